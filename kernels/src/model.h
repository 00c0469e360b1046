// A decoder of the Llama kind: its weights and the caches of its sequences (forward.h computes).
// Families differ only in the switches of Config and in which vectors are set (biases, norms of heads, post-norms).
#pragma once
#include <vector>

#include "hyflash_kernels.h"
#include "kernels.h"

namespace hk {

using Config = hk_config;
using Batch = hk_batch;

enum MatrixSlot { kQuery, kKey, kValue, kOutput, kGate, kUp, kDown, kNumMatrices };
enum VectorSlot { kAttnNorm, kFfnNorm, kAttnPostNorm, kFfnPostNorm, kQueryNorm, kKeyNorm, kNumVectors };

struct Layer {
  hk_matrix matrix[kNumMatrices] = {};
  const float* vector[kNumVectors] = {};
  int32_t window = 0;  // 0: all earlier tokens
  int32_t rope = 0;    // index of its frequencies
};

// Keys and values in pages of kPage tokens; a page holds every layer and head. Rejected tokens stay until overwritten.
class Caches {
 public:
  explicit Caches(const Config& config);
  ~Caches();
  Caches(const Caches&) = delete;

  int open();
  void close(int seq);
  bool is_open(int seq) const { return seq >= 0 && size_t(seq) < sequences_.size() && sequences_[size_t(seq)].open; }
  int64_t length(int seq) const { return sequences_[size_t(seq)].length; }
  void set_length(int seq, int64_t length) { sequences_[size_t(seq)].length = length; }
  bool reserve(int seq, int64_t length);  // false when there is no memory
  int64_t nbytes() const;                 // of the tokens that open sequences hold
  int64_t reserved_bytes() const;         // of all pages, those of closed sequences too

  uint8_t* keys(int seq, int64_t page, int layer, int head) const {
    return sequences_[size_t(seq)].pages[size_t(page)] + (int64_t(layer) * num_heads_ + head) * 2 * part_bytes_;
  }
  uint8_t* values(int seq, int64_t page, int layer, int head) const { return keys(seq, page, layer, head) + part_bytes_; }

 private:
  struct Sequence {
    bool open = false;
    int64_t length = 0;
    std::vector<uint8_t*> pages;
  };
  const int64_t num_layers_, num_heads_, part_bytes_, page_bytes_;
  std::vector<Sequence> sequences_;
  std::vector<uint8_t*> free_;
};

// One cached key or value as float32 (head_dim).
void read_kv(const Config& c, const Caches& caches, int seq, int layer, int head, bool value, int64_t pos, float* out);

struct Model {
  explicit Model(const Config& c) : config(c), layers(size_t(c.num_layers)), caches(c) {}

  const Config config;
  std::vector<Layer> layers;
  hk_matrix head = {};
  const float* final_norm = nullptr;
  const uint8_t* embedding = nullptr;  // GGUF rows
  int32_t embedding_type = -1;
  std::vector<std::vector<double>> frequencies;  // (rope_dim / 2) of each kind of rotation
  Caches caches;
};

}  // namespace hk
