// Where the blocks of a CPU allocator lie: no memory is wasted on holes, and no time on page faults.
//
// Why not malloc: PyTorch asks for 64-byte alignment, for which glibc looks for a hole 96 bytes larger than the block, so
// a freed tensor's place is too small for the next tensor of the same size; and what it maps and unmaps instead has to be
// faulted in page by page. Here blocks of 64 KiB and more come from one reserved stretch of addresses backed by 2 MiB
// pages: best fit, lowest address first, neighbouring holes merged at once. Pages of holes stay until `trim` is called.
// Smaller blocks are the default allocator's business.
//
// A step that repeats itself can do better than best fit. `record` writes down which blocks it takes and when they go;
// whoever reads that works out a place for each of them, and with `follow` the n-th block goes to its place, which may
// have room for blocks of other sizes, too. A block of another size than expected, or one whose place is taken, goes
// outside the region of the planned places, so that it spoils no other one's; but in a step that has lost its way there
// is nothing to spoil, and it takes the region's pages.
//
// Regions have the upper half of the addresses to themselves. Where steps of several kinds take turns, those of all of
// them begin at the same address, and have the same pages. If what outlives a step is in the way of that, a region lies
// higher; then the pages of one are given up when a step begins that follows another.
//
// Between two such steps the region of the planned places lies idle, with its pages. An optimizer's temporaries go there:
// blocks of sizes that were seen to come and go between steps, and for long not to be there when the next one began.
//
// Some blocks are never written to: PyTorch's backward pass of batch norm takes one as large as its result and drops it.
// No page of theirs becomes resident, unless they get addresses that others use. So while a step is recorded, or an op
// watched, a few words of each new block are marked; if all of them are as they were when it goes, nobody wrote to it.
//
// What the thread that runs the steps has taken is counted apart from all else, so that it is seen which steps hold more
// than others, whatever a user's other threads do meanwhile.

#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "count.h"
#include "marks.h"
#include "watch.h"

namespace ebbtide {

constexpr std::size_t kGrain = 64;
constexpr std::size_t kReserve = std::size_t(1) << 40;  // addresses, not memory
constexpr std::size_t kHuge = 2 << 20;
constexpr std::size_t kPage = 4096;
constexpr std::size_t kSizes = 4096;      // different sizes to remember
constexpr int kSteps = 64;                // planned steps for which a size that stayed is taken to stay again
constexpr std::size_t kLookahead = 16;  // blocks that a step may leave out without losing its place in the plan
constexpr std::size_t kLost = 8;         // a step has lost its way when one part in so many of its region went astray

// A block of a recorded step, with its room. Times count what is taken and given back; -1: still there.
struct Recorded {
  std::int64_t size, born, dies, written;
};

struct Taken {
  std::size_t size;
  std::int64_t recorded;  // index among the recorded blocks, -1 if none
  bool marked;
  std::int64_t turn;  // see Count
};

struct Planned {
  std::size_t least, most;  // sizes that may lie there
  Address place;
};

struct Arena {
  std::mutex lock;
  Address base = 0, top = 0;                          // [base, top) is taken or hole
  Address middle = 0, regions_end = 0, end = 0;       // [middle, regions_end), of which regions are parts, as well
  std::map<Address, std::size_t> holes;               // by address
  std::set<std::pair<std::size_t, Address>> by_size;  // the same, by size
  std::unordered_map<Address, Taken> taken;

  std::size_t live = 0;  // bytes taken

  Count stepping;  // what the thread that runs the steps has taken

  Watches watches;

  bool recording = false;
  std::int64_t now = 0;
  std::vector<Recorded> records;

  bool following = false;
  std::vector<Planned> plan;
  std::size_t next = 0, astray = 0;  // astray: bytes that did not go to a planned place
  Address region = 0, written_end = 0;        // of the planned places, those that are written to
  bool regions_idle = true;                   // nothing of them has been used since their pages were given up
  std::size_t outside = 0, outside_most = 0;  // bytes taken where no regions are; the most since the last trim

  std::unordered_map<Address, std::size_t> between;  // blocks taken since the last planned step, and their sizes
  std::unordered_set<std::size_t> passing;       // sizes that were given back before the next
  std::unordered_map<std::size_t, int> staying;  // sizes that were not, and for how many steps that counts

  bool reserve() {
    for (std::size_t size = kReserve; size >= kHuge * 1024; size /= 2) {
      void* memory = mmap(nullptr, size + kHuge, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (memory != MAP_FAILED) {
        if (size < kReserve) {  // addresses are limited (`ulimit -v`), and all others in the process need some, too
          size /= 2;
          munmap(static_cast<char*>(memory) + size + kHuge, size);
        }
        madvise(memory, size + kHuge, MADV_HUGEPAGE);  // advice: without huge pages it works, too
        base = top = (Address(memory) + kHuge - 1) / kHuge * kHuge;
        middle = regions_end = base + size / 2;
        end = base + size;
        return true;
      }
    }
    return false;
  }

  void add_hole(Address start, std::size_t size) {
    holes.emplace(start, size);
    by_size.emplace(size, start);
  }

  void drop_hole(std::map<Address, std::size_t>::iterator hole) {
    by_size.erase({hole->second, hole->first});
    holes.erase(hole);
  }

  // Where a block of `size` bytes can start within a hole so that the address is `offset` modulo `alignment`.
  static Address place(Address start, std::size_t alignment, std::size_t offset) {
    Address aligned = start / alignment * alignment + offset;
    return aligned < start ? aligned + alignment : aligned;
  }

  using Hole = std::map<Address, std::size_t>::iterator;

  bool is_lost() const { return following && astray > (written_end - region) / kLost; }

  void* carve(Hole hole, Address at, std::size_t size) {
    Address start = hole->first, stop = start + hole->second;
    drop_hole(hole);
    if (at > start) add_hole(start, at - start);
    if (stop > at + size) add_hole(at + size, stop - at - size);
    return note(at, size);
  }

  // What a block takes of a plan: one that has to lie like another may begin further on, and each step elsewhere.
  static std::size_t room(std::size_t size, std::size_t alignment) {
    return alignment > kGrain ? size + alignment : size;
  }

  // The place that the plan has for the next block, if it is free.
  void* take_planned(std::size_t size, std::size_t alignment, std::size_t offset) {
    const std::size_t wanted = room(size, alignment);
    for (std::size_t i = next; i < plan.size() && i < next + kLookahead; ++i) {
      if (wanted < plan[i].least || wanted > plan[i].most) continue;
      next = i + 1;
      Address at = place(plan[i].place, alignment, offset);
      auto hole = holes.upper_bound(at);
      if (at + size > plan[i].place + plan[i].most || hole == holes.begin()) break;
      --hole;
      if (hole->first + hole->second < at + size) break;
      return carve(hole, at, size);
    }
    astray += size;
    return nullptr;
  }

  // The smallest hole that fits, where regions are or elsewhere.
  void* take_hole(std::size_t size, std::size_t alignment, std::size_t offset, bool among_regions) {
    for (auto it = by_size.lower_bound({size, 0}); it != by_size.end(); ++it) {
      Address start = it->second, stop = start + it->first, at = place(start, alignment, offset);
      if (at + size <= stop && (start >= middle) == among_regions) return carve(holes.find(start), at, size);
    }
    return nullptr;
  }

  // The smallest hole among the pages of the planned places.
  void* take_idle(std::size_t size, std::size_t alignment, std::size_t offset) {
    for (auto it = by_size.lower_bound({size, 0}); it != by_size.end(); ++it) {
      Address start = it->second, stop = std::min(start + it->first, written_end);
      Address at = place(std::max(start, region), alignment, offset);
      if (at + size <= stop) return carve(holes.find(start), at, size);
    }
    return nullptr;
  }

  void* take_top(std::size_t size, std::size_t alignment, std::size_t offset) {
    auto after = holes.lower_bound(top), last = after == holes.begin() ? holes.end() : std::prev(after);
    bool grow = last != holes.end() && last->first + last->second == top;
    Address start = grow ? last->first : top, at = place(start, alignment, offset);
    if (at + size + kHuge > middle) return nullptr;  // no hole reaches from one side to the other
    if (grow) drop_hole(last);
    if (at > start) add_hole(start, at - start);
    top = at + size;
    return note(at, size);
  }

  void* take(std::size_t size, std::size_t alignment, std::size_t offset) {
    size = (size + kGrain - 1) / kGrain * kGrain;
    std::lock_guard<std::mutex> guard(lock);
    void* memory = following ? take_planned(size, alignment, offset) : nullptr;
    bool passes = !following && !recording && passing.contains(size) && !staying.contains(size);
    if (memory == nullptr && written_end > region && (passes || is_lost())) memory = take_idle(size, alignment, offset);
    if (memory == nullptr) memory = take_hole(size, alignment, offset, false);
    if (memory == nullptr) memory = take_top(size, alignment, offset);
    // What stays within a region takes planned blocks their places: only where no addresses are left.
    if (memory == nullptr && !following) memory = take_hole(size, alignment, offset, true);
    if (memory != nullptr && recording) records.back().size = std::int64_t(room(size, alignment));
    return memory;
  }

  void* note(Address at, std::size_t size) {
    std::int64_t recorded = -1;
    if (recording) {
      recorded = std::int64_t(records.size());
      records.push_back({std::int64_t(size), now++, -1, 1});
    }
    bool marked = recording || watches.any();
    if (marked) write_marks(at, size);
    watches.each([&](Watch& watch) { watch.take(at, size); });
    taken.emplace(at, Taken{size, recorded, marked, stepping.take(size)});
    if (!following && !recording) between.emplace(at, size);
    live += size;
    if (at < middle) outside_most = std::max(outside_most, outside += size);
    return reinterpret_cast<void*>(at);
  }

  bool give_back(void* memory) {
    Address start = Address(memory);
    if (start < base || start >= end) return false;
    std::lock_guard<std::mutex> guard(lock);
    auto block = taken.find(start);
    if (block == taken.end()) return false;
    std::size_t size = block->second.size;
    bool written = !block->second.marked || !marks_intact(start, size);
    if (recording && block->second.recorded >= 0) {
      records[block->second.recorded].dies = now++;
      records[block->second.recorded].written = written;
    }
    watches.each([&](Watch& watch) { watch.give_back(start, size, written); });
    if (between.erase(start) > 0 && passing.size() < kSizes) passing.insert(size);
    stepping.give_back(size, block->second.turn);
    taken.erase(block);
    live -= size;
    if (start < middle) outside -= size;
    auto next = holes.lower_bound(start);
    if (next != holes.end() && next->first == start + size) {
      size += next->second;
      drop_hole(next++);
    }
    if (next != holes.begin()) {
      auto before = std::prev(next);
      if (before->first + before->second == start) {
        start = before->first;
        size += before->second;
        drop_hole(before);
      }
    }
    add_hole(start, size);
    return true;
  }

  std::size_t mark() {
    std::lock_guard<std::mutex> guard(lock);
    watches.begin(live);
    return live;
  }

  std::size_t most() {
    std::lock_guard<std::mutex> guard(lock);
    return watches.end();
  }

  std::int64_t count() {
    std::lock_guard<std::mutex> guard(lock);
    watches.runs_step();
    return stepping.begin();
  }

  Count counted() {
    std::lock_guard<std::mutex> guard(lock);
    return stepping;
  }

  void record(bool on) {
    std::lock_guard<std::mutex> guard(lock);
    if (on) {
      records.clear();
      now = 0;
      for (auto& [address, block] : taken) block.recorded = -1;
    }
    recording = on;
  }

  // A region of `size` bytes in which nothing is taken now. Returns its start, or 0 if there are not so many addresses.
  Address new_region(std::size_t size) {
    std::lock_guard<std::mutex> guard(lock);
    Address start = middle, above = middle;
    bool free = true;
    for (const auto& [address, block] : taken) {
      if (address < middle) continue;
      free = free && address >= start + size;
      above = std::max(above, address + block.size);
    }
    if (!free) start = (above + kHuge - 1) / kHuge * kHuge;
    if (start + size > end) return 0;
    if (start + size > regions_end) {
      auto last = holes.empty() ? holes.end() : std::prev(holes.end());
      Address from = regions_end;
      regions_end = start + size;
      if (last != holes.end() && last->first + last->second == from) {
        from = last->first;
        drop_hole(last);
      }
      add_hole(from, regions_end - from);
    }
    return start;
  }

  void follow(const std::int64_t* least, const std::int64_t* most, const std::int64_t* offsets, std::size_t count,
              Address start, std::size_t written) {
    std::lock_guard<std::mutex> guard(lock);
    for (auto& [bytes, steps] : staying) --steps;
    std::erase_if(staying, [](const auto& size) { return size.second == 0; });
    for (const auto& [address, bytes] : between) {
      if (staying.size() < kSizes) staying[bytes] = kSteps;
    }
    between.clear();
    if (start != region) give_up_regions(start, start + written);
    region = start;
    regions_idle = false;
    written_end = start + written;
    plan.resize(count);
    for (std::size_t i = 0; i < count; ++i) {
      plan[i] = {std::size_t(least[i]), std::size_t(most[i]), start + Address(offsets[i])};
    }
    next = astray = 0;
    following = true;
  }

  std::size_t unfollow() {
    std::lock_guard<std::mutex> guard(lock);
    following = false;
    return astray;
  }

  static void give_up(Address start, Address stop) {
    start = (start + kPage - 1) / kPage * kPage;
    stop = stop / kPage * kPage;
    if (stop > start) madvise(reinterpret_cast<void*>(start), stop - start, MADV_DONTNEED);
  }

  // Give up the pages of what is not taken where regions are, except those of [from, to).
  void give_up_regions(Address from, Address to) {
    for (auto hole = holes.lower_bound(middle); hole != holes.end(); ++hole) {
      Address start = hole->first, stop = start + hole->second;
      give_up(start, std::min(stop, from));
      give_up(std::max(start, to), stop);
    }
  }

  // A step begins that follows no plan: it needs none of their pages.
  void leave_regions() {
    std::lock_guard<std::mutex> guard(lock);
    if (!regions_idle) give_up_regions(middle, middle);
    regions_idle = true;
  }

  // Gives the whole pages of the holes back to the system: of all of them, or of those where no regions are.
  void trim(bool regions_too) {
    std::lock_guard<std::mutex> guard(lock);
    for (auto hole = holes.begin(), stop = holes.lower_bound(middle); hole != stop; ++hole) {
      give_up(hole->first, hole->first + hole->second);
    }
    if (regions_too) give_up_regions(middle, middle);
    outside_most = outside;
  }

  // Bytes where no regions are that nobody holds, and that are resident still as they were held since the last trim.
  std::size_t left_outside() {
    std::lock_guard<std::mutex> guard(lock);
    return outside_most - outside;
  }
};

}  // namespace ebbtide
