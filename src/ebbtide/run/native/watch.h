// Watches what an op takes inside itself, whatever other threads do meanwhile.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <thread>
#include <vector>

#include "marks.h"

namespace ebbtide {

// What an op that is watched takes (positive) and gives back (negative).
struct Change {
  std::int64_t bytes;
  Address block;
};

struct Watch {
  std::size_t before = 0;  // bytes taken when it began
  std::vector<Change> changes;

  void take(Address at, std::size_t size) { changes.push_back({std::int64_t(size), at}); }

  // A block goes: one that was taken since, and never written to, was not there at all.
  void give_back(Address at, std::size_t size, bool written) {
    auto its = std::find_if(changes.rbegin(), changes.rend(), [at](const Change& c) { return c.block == at; });
    if (!written && its != changes.rend() && its->bytes > 0) {
      its->bytes = 0;
    } else {
      changes.push_back({-std::int64_t(size), at});
    }
  }

  // The most bytes at once, with those from before.
  std::size_t most() const {
    std::int64_t now = std::int64_t(before), most = now;
    for (const Change& change : changes) most = std::max(most, now += change.bytes);
    return std::size_t(most);
  }
};

// One for each thread that watches an op now.
struct Watches {
  std::map<std::thread::id, Watch> of;
  std::set<std::thread::id> own_steps;  // threads that run steps: what they take is in no other one's op

  bool any() const { return !of.empty(); }

  // The calling thread begins a step. A watch that was left by an op that failed ends.
  void runs_step() {
    own_steps.insert(std::this_thread::get_id());
    of.erase(std::this_thread::get_id());
  }

  void begin(std::size_t taken) {
    own_steps.insert(std::this_thread::get_id());
    of[std::this_thread::get_id()] = {taken, {}};
  }

  std::size_t end() {
    auto watch = of.extract(std::this_thread::get_id());
    return watch.empty() ? 0 : watch.mapped().most();
  }

  // Call with those at whose op the calling thread may be: its own, or, if it runs no steps, anybody's.
  template <class Call>
  void each(Call call) {
    if (of.empty()) return;
    auto me = std::this_thread::get_id();
    if (auto own = of.find(me); own != of.end()) {
      call(own->second);
    } else if (!own_steps.contains(me)) {
      for (auto& [thread, watch] : of) call(watch);
    }
  }
};

}  // namespace ebbtide
