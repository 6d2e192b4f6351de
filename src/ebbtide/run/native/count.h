// Counts what one thread takes, whatever others do meanwhile.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <thread>

namespace ebbtide {

struct Count {
  std::thread::id thread;
  std::int64_t turn = 0;                  // how often counting began
  std::size_t now = 0, most = 0;          // bytes of all that it took, and the most since counting began
  std::size_t fresh = 0, fresh_most = 0;  // the same of what it took since

  // Count what the calling thread takes from now on. Returns the number of this turn.
  std::int64_t begin() {
    thread = std::this_thread::get_id();
    most = now;
    fresh = fresh_most = 0;
    return ++turn;
  }

  // A block is taken. Returns the turn in which it was counted, to be told when it goes; -1 if it was not.
  std::int64_t take(std::size_t size) {
    if (thread != std::this_thread::get_id()) return -1;
    most = std::max(most, now += size);
    fresh_most = std::max(fresh_most, fresh += size);
    return turn;
  }

  void give_back(std::size_t size, std::int64_t taken_in) {
    if (taken_in >= 0) now -= size;
    if (taken_in == turn) fresh -= size;
  }
};

}  // namespace ebbtide
