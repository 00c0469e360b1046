#include "model.h"

#include <cstdlib>
#include <cstring>
#include <new>

#include "half.h"

namespace hk {

Caches::Caches(const Config& c)
    : num_layers_(c.num_layers),
      num_heads_(c.num_kv_heads),
      part_bytes_(page_size(c.kv_type, c.head_dim)),
      page_bytes_(part_bytes_ * 2 * c.num_layers * c.num_kv_heads) {}

Caches::~Caches() {
  for (Sequence& s : sequences_) free_.insert(free_.end(), s.pages.begin(), s.pages.end());
  for (uint8_t* page : free_) ::operator delete(page, std::align_val_t(64));
}

int Caches::open() {
  size_t seq = 0;
  while (seq < sequences_.size() && sequences_[seq].open) ++seq;
  if (seq == sequences_.size()) sequences_.emplace_back();
  sequences_[seq].open = true;
  sequences_[seq].length = 0;
  return int(seq);
}

void Caches::close(int seq) {
  Sequence& s = sequences_[size_t(seq)];
  free_.insert(free_.end(), s.pages.begin(), s.pages.end());
  s.pages.clear();
  s.open = false;
  s.length = 0;
}

bool Caches::reserve(int seq, int64_t length) {
  Sequence& s = sequences_[size_t(seq)];
  while (int64_t(s.pages.size()) * kPage < length) {
    uint8_t* page = nullptr;
    if (free_.empty()) {
      page = static_cast<uint8_t*>(::operator new(size_t(page_bytes_), std::align_val_t(64), std::nothrow));
      if (!page) return false;
    } else {
      page = free_.back();
      free_.pop_back();
    }
    std::memset(page, 0, size_t(page_bytes_));  // masked lanes must be finite
    s.pages.push_back(page);
  }
  return true;
}

int64_t Caches::nbytes() const {
  int64_t tokens = 0;
  for (const Sequence& s : sequences_) tokens += s.length;
  return tokens * (page_bytes_ / kPage);
}

int64_t Caches::reserved_bytes() const {
  size_t pages = free_.size();
  for (const Sequence& s : sequences_) pages += s.pages.size();
  return int64_t(pages) * page_bytes_;
}

void read_kv(const Config& c, const Caches& caches, int seq, int layer, int head, bool value, int64_t pos, float* out) {
  const uint8_t* page = value ? caches.values(seq, pos / kPage, layer, head) : caches.keys(seq, pos / kPage, layer, head);
  const int64_t t = pos % kPage, dim = c.head_dim;
  for (int64_t d = 0; d < dim; ++d) {
    const int64_t at = value ? t * dim + d : d * kPage + t;  // keys lie across
    switch (c.kv_type) {
      case kKvF16: out[d] = half_to_float(reinterpret_cast<const uint16_t*>(page)[at]); break;
      case kKvBF16: out[d] = bf16_to_float(reinterpret_cast<const uint16_t*>(page)[at]); break;
      case kKvF32: std::memcpy(out + d, page + 4 * at, 4); break;
      default:
        std::memcpy(out + d, page + dim * kPage + 4 * t, 4);
        out[d] *= float(int8_t(page[at]));
    }
  }
}

}  // namespace hk
