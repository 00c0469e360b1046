// One forward of ragged rows of several sequences through a model, on the threads of a pool.
#pragma once
#include <atomic>
#include <memory>
#include <vector>

#include "layers.h"
#include "model.h"

namespace hk {

class Forward {
 public:
  Forward(Model& model, const Kernels& kernels, Workers& workers);

  // Append the rows to their sequences. False when there is no memory; nothing has changed then.
  bool run(const Batch& batch);
  // Logits (rows, vocab) of final-normed states (rows, hidden).
  bool head(const float* hidden, int64_t rows, float* logits);
  void set_threads(int num_threads);
  int64_t scratch_bytes() const;  // kept between forwards

 private:
  struct Row {
    int32_t seq;
    int64_t pos;
  };
  struct Item {  // attention work: rows of one sequence against splits [first, last) of one KV head
    int32_t seq, row, num_rows, head, first, last;
  };
  struct Plan {
    int window;
    std::vector<Item> items;
  };
  struct Space;

  void make_space(int64_t rows);
  void prepare(const Batch& batch);
  void make_plans(const Batch& batch);
  void thread(const Batch& batch, int t);
  void embed(const Batch& batch, int t);
  void project(int index, int t);
  void place(const Layer& layer, int index, int slot, int head, const Row& row, float* x, int t);
  void attend(int index, int t);
  void merge(const Layer& layer, int t);
  void add_to_stream(const hk_matrix& m, const Acts& in, const float* post_norm, int t);
  void norm(const float* weight, const std::vector<int64_t>* listed, int t);
  void feed(const Layer& layer, int t);
  void tap(const Batch& batch, int index, int t);
  void finish(const Batch& batch, int t);
  void head_part(int64_t rows, float* logits, int t);
  void best(const Batch& batch, const float* logits, int t);

  Model& model_;
  const Config& c_;
  const Kernels& k_;
  std::unique_ptr<Pool>& pool_;  // the workers'
  std::shared_ptr<Space> space_;
  std::vector<Row> rows_;
  std::vector<int64_t> wanted_;   // rows whose logits are wanted
  std::vector<Plan> plans_;       // one for each window among the layers
  bool split_ = false;            // splits are shared out among threads and merged afterwards
  bool merge_later_ = false;      // attention items do not end with whole blocks of finished values
  int64_t num_splits_ = 0;
  std::atomic<int64_t> next_{0};  // of the attention items
  std::vector<std::vector<float>> rotations_;  // of each kind: [position][rope_dim / 2][cos, sin]
};

}  // namespace hk
