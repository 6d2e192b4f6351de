// A CPU allocator for PyTorch that wastes no memory on holes and no time on page faults.
//
// Why not malloc: PyTorch asks for 64-byte alignment, for which glibc looks for a hole 96 bytes larger than the block, so
// a freed tensor's place is too small for the next tensor of the same size; and what it maps and unmaps instead has to be
// faulted in page by page. Here blocks of 64 KiB and more come from one reserved stretch of addresses backed by 2 MiB
// pages: best fit, lowest address first, neighbouring holes merged at once. Pages of holes stay until `trim` is called.
// Smaller blocks are the default allocator's business.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <set>
#include <unordered_map>
#include <utility>

namespace {

constexpr std::size_t kLeast = 64 << 10;  // smaller blocks: holes between them would cost more than they save
constexpr std::size_t kGrain = 64;
constexpr std::size_t kReserve = std::size_t(1) << 40;  // addresses, not memory
constexpr std::size_t kHuge = 2 << 20;
constexpr std::size_t kPage = 4096;

using Address = std::uintptr_t;

struct Arena {
  std::mutex lock;
  Address base = 0, end = 0, top = 0;                 // [base, top) is taken or hole
  std::map<Address, std::size_t> holes;               // by address
  std::set<std::pair<std::size_t, Address>> by_size;  // the same, by size
  std::unordered_map<Address, std::size_t> taken;

  bool reserve() {
    for (std::size_t size = kReserve; size >= kHuge * 1024; size /= 2) {
      void* memory = mmap(nullptr, size + kHuge, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (memory != MAP_FAILED) {
        madvise(memory, size + kHuge, MADV_HUGEPAGE);  // advice: without huge pages it works, too
        base = top = (Address(memory) + kHuge - 1) / kHuge * kHuge;
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

  void* take(std::size_t size, std::size_t alignment, std::size_t offset) {
    size = (size + kGrain - 1) / kGrain * kGrain;
    std::lock_guard<std::mutex> guard(lock);
    for (auto it = by_size.lower_bound({size, 0}); it != by_size.end(); ++it) {
      Address start = it->second, stop = start + it->first, at = place(start, alignment, offset);
      if (at + size > stop) continue;
      drop_hole(holes.find(start));
      if (at > start) add_hole(start, at - start);
      if (stop > at + size) add_hole(at + size, stop - at - size);
      return note(at, size);
    }
    auto last = holes.empty() ? holes.end() : std::prev(holes.end());
    Address start = last != holes.end() && last->first + last->second == top ? last->first : top;
    Address at = place(start, alignment, offset);
    if (at + size > end) return nullptr;
    if (start != top) drop_hole(last);
    if (at > start) add_hole(start, at - start);
    top = at + size;
    return note(at, size);
  }

  void* note(Address at, std::size_t size) {
    taken.emplace(at, size);
    return reinterpret_cast<void*>(at);
  }

  bool give_back(void* memory) {
    Address start = Address(memory);
    if (start < base || start >= end) return false;
    std::lock_guard<std::mutex> guard(lock);
    auto block = taken.find(start);
    if (block == taken.end()) return false;
    std::size_t size = block->second;
    taken.erase(block);
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

  // Gives the whole pages of the holes back to the system.
  void trim() {
    std::lock_guard<std::mutex> guard(lock);
    for (const auto& [address, size] : holes) {
      Address start = (address + kPage - 1) / kPage * kPage, stop = (address + size) / kPage * kPage;
      if (stop > start) madvise(reinterpret_cast<void*>(start), stop - start, MADV_DONTNEED);
    }
  }
};

Arena& arena() {
  static Arena* the = new Arena;  // never destroyed: tensors may outlive everything
  return *the;
}

c10::Allocator* fallback = nullptr;

void give_back(void* memory) {
  if (!arena().give_back(memory)) fallback->raw_deleter()(memory);
}

struct ArenaAllocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t size) override {
    if (size >= kLeast) {
      if (void* memory = arena().take(size, kGrain, 0)) {
        return {memory, memory, &give_back, c10::Device(c10::DeviceType::CPU)};
      }
    }
    return fallback->allocate(size);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* target, const void* source, std::size_t size) const override {
    std::memcpy(target, source, size);
  }
};

ArenaAllocator allocator;

}  // namespace

extern "C" {

// Make new CPU tensors come from the arena (1) or from PyTorch's own allocator again (0). Returns whether it could be done.
int ebbtide_arena_use(int on) {
  static bool ready = arena().reserve();
  if (!ready) return 0;
  if (fallback == nullptr) fallback = c10::GetCPUAllocator();
  c10::SetCPUAllocator(on ? static_cast<c10::Allocator*>(&allocator) : fallback, 255);
  return 1;
}

void* ebbtide_arena_take(std::size_t size, std::size_t alignment, std::size_t offset) {
  return arena().take(size, alignment, offset);
}

void ebbtide_arena_give_back(void* memory) { give_back(memory); }

void ebbtide_arena_trim() { arena().trim(); }
}
