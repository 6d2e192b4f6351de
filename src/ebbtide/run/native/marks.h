// Tells whether a block was ever written to: a few words of it are marked, and looked at when it goes.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace ebbtide {

using Address = std::uintptr_t;

constexpr std::size_t kMarked = 64 << 10;  // bytes from one marked word to the next

inline std::uint64_t mark_at(Address at) { return std::uint64_t(at) ^ 0x9e3779b97f4a7c15u; }

inline void write_marks(Address at, std::size_t size) {
  for (Address word = at; word < at + size; word += kMarked) {
    std::uint64_t mark = mark_at(word);
    std::memcpy(reinterpret_cast<void*>(word), &mark, sizeof mark);  // a block may begin at any byte
  }
}

inline bool marks_intact(Address at, std::size_t size) {
  for (Address word = at; word < at + size; word += kMarked) {
    std::uint64_t found;
    std::memcpy(&found, reinterpret_cast<const void*>(word), sizeof found);
    if (found != mark_at(word)) return false;
  }
  return true;
}

}  // namespace ebbtide
