// SPDX-License-Identifier: BSD-3-Clause
// A queue that stops allocating once it has seen its deepest state: a power-of-two ring that grows.
#pragma once

#include <cassert>
#include <cstddef>
#include <utility>
#include <vector>

namespace rtrsnbd::fabric::soft {

template <typename T>
class Ring {
 public:
  [[nodiscard]] bool empty() const { return size_ == 0; }
  [[nodiscard]] size_t size() const { return size_; }

  T& operator[](size_t index) {
    assert(index < size_);
    return slots_[(head_ + index) & (slots_.size() - 1)];
  }
  const T& operator[](size_t index) const {
    assert(index < size_);
    return slots_[(head_ + index) & (slots_.size() - 1)];
  }
  T& front() { return (*this)[0]; }
  T& back() { return (*this)[size_ - 1]; }

  void push_back(T value) {
    if (size_ == slots_.size()) grow();
    slots_[(head_ + size_) & (slots_.size() - 1)] = std::move(value);
    ++size_;
  }
  void pop_front() {
    assert(size_ > 0);
    slots_[head_] = T{};
    head_ = (head_ + 1) & (slots_.size() - 1);
    --size_;
  }
  void clear() {
    while (!empty()) pop_front();
  }

 private:
  static constexpr size_t first_capacity = 16;

  void grow() {
    std::vector<T> larger(slots_.empty() ? first_capacity : slots_.size() * 2);
    for (size_t i = 0; i < size_; ++i) larger[i] = std::move((*this)[i]);
    slots_ = std::move(larger);
    head_ = 0;
  }

  std::vector<T> slots_;
  size_t head_ = 0;
  size_t size_ = 0;
};

}  // namespace rtrsnbd::fabric::soft
