// Memory that is used again: it grows to the largest size asked for, and what is in it is not cleared.
#pragma once

#include <cstddef>
#include <memory>

namespace moerelay {

template <typename T>
class Buffer {
 public:
  // At least `size` elements, with any content.
  T* fit(size_t size) {
    if (size > size_) {
      data_ = std::make_unique_for_overwrite<T[]>(size);
      size_ = size;
    }
    return data_.get();
  }
  T* data() const { return data_.get(); }

 private:
  std::unique_ptr<T[]> data_;
  size_t size_ = 0;
};

}  // namespace moerelay
