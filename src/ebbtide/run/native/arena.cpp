// A CPU allocator for PyTorch over an arena, see arena.h, and what Python calls of it.

#include "arena.h"

#include <pthread.h>
#include <sys/sysinfo.h>

#include <ATen/dlpack.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>

using ebbtide::Address;
using ebbtide::Arena;
using ebbtide::Count;
using ebbtide::kGrain;

namespace {

constexpr std::size_t kLeast = 64 << 10;  // smaller blocks: holes between them would cost more than they save

// What no process can have: there would be addresses for it, but PyTorch's own allocator says that there is no memory.
std::size_t most() {
  static const std::size_t bytes = [] {
    struct sysinfo found;
    return sysinfo(&found) ? SIZE_MAX : (std::size_t(found.totalram) + found.totalswap) * found.mem_unit;
  }();
  return bytes;
}

Arena& arena() {
  static Arena* the = new Arena;  // never destroyed: tensors may outlive everything
  return *the;
}

// PyTorch frees some memory, that of oneDNN's tensors for one, by whatever its allocator is at that time. So once ours is
// there it stays, to know its blocks again; whether new ones come from the arena is another matter.
c10::Allocator* fallback = nullptr;
std::atomic<bool> in_use{false};

void give_back(void* memory) {
  if (!arena().give_back(memory)) fallback->raw_deleter()(memory);
}

struct ArenaAllocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t size) override {
    if (size >= kLeast && size <= most() && in_use) {
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

// Bytes for PyTorch to adopt. When they die, no Python code runs that an interrupt could strike.
struct Adopted {
  DLManagedTensor tensor;
  std::int64_t size, stride;
};

void give_back_adopted(DLManagedTensor* tensor) {
  give_back(tensor->dl_tensor.data);
  delete reinterpret_cast<Adopted*>(tensor);
}

}  // namespace

extern "C" {

// Be there for those who ask for memory themselves. Returns whether it could be done.
int ebbtide_arena_reserve() {
  static bool ready = [] {
    // Another thread may hold the lock while one forks (for a data loader's workers): the child would wait for ever. And
    // what a child takes is no part of the step that its parent is in: it would be written down for as long as it lives.
    pthread_atfork([] { arena().lock.lock(); }, [] { arena().lock.unlock(); },
                   [] {
                     arena().recording = false;
                     arena().watches.of.clear();
                     arena().lock.unlock();
                   });
    return arena().reserve();
  }();
  return ready;
}

// Let new CPU tensors come from the arena (1) or from PyTorch's own allocator again (0). Returns whether it could be done.
int ebbtide_arena_use(int on) {
  static std::once_flag there;
  if (!ebbtide_arena_reserve()) return 0;
  if (on) {
    std::call_once(there, [] {
      fallback = c10::GetCPUAllocator();
      c10::SetCPUAllocator(&allocator, 255);
    });
  }
  in_use = on != 0;
  return 1;
}

// A DLPack tensor of so many bytes, at an address that is `offset` modulo `alignment`; null if there is no memory.
DLManagedTensor* ebbtide_arena_take(std::size_t size, std::size_t alignment, std::size_t offset) {
  void* memory = arena().take(size, alignment, offset);
  if (memory == nullptr) return nullptr;
  auto* adopted = new Adopted{{}, std::int64_t(size), 1};
  adopted->tensor.dl_tensor = {memory, {kDLCPU, 0}, 1, {kDLUInt, 8, 1}, &adopted->size, &adopted->stride, 0};
  adopted->tensor.deleter = &give_back_adopted;
  return &adopted->tensor;
}

// Let a storage that was adopted be enlarged and emptied, as any other one may be.
void ebbtide_arena_let_resize(void* storage) {
  auto* adopted = static_cast<c10::StorageImpl*>(storage);
  adopted->set_allocator(c10::GetCPUAllocator());
  adopted->set_resizable(true);
}

void ebbtide_arena_trim(int regions_too) { arena().trim(regions_too != 0); }

void ebbtide_arena_leave_regions() { arena().leave_regions(); }

std::size_t ebbtide_arena_left_outside() { return arena().left_outside(); }

// Bytes taken now. From now on what is taken is watched for the calling thread.
std::size_t ebbtide_arena_mark() { return arena().mark(); }

// The most bytes taken at once since `mark`, without blocks that came and went and were never written to. Ends that watch.
std::size_t ebbtide_arena_most() { return arena().most(); }

// From now on count the blocks that the calling thread takes, and no other one's. Returns the number of this turn.
std::int64_t ebbtide_arena_count() { return arena().count(); }

// The most bytes that it had at once in that turn, of all that were ever counted and of those taken since. Returns whether
// the turn lasted until now.
int ebbtide_arena_most_counted(std::int64_t turn, std::size_t* all, std::size_t* fresh) {
  Count count = arena().counted();
  *all = count.most;
  *fresh = count.fresh_most;
  return count.turn == turn;
}

// Start (1) or stop (0) writing down what is taken and given back.
void ebbtide_arena_record(int on) { arena().record(on != 0); }

// How many blocks were recorded, and, if there is room for them, what they were.
std::size_t ebbtide_arena_recorded(std::int64_t* sizes, std::int64_t* born, std::int64_t* dies, std::int64_t* written,
                                   std::size_t room) {
  std::lock_guard<std::mutex> guard(arena().lock);
  const auto& records = arena().records;
  for (std::size_t i = 0; i < records.size() && i < room; ++i) {
    sizes[i] = records[i].size;
    born[i] = records[i].born;
    dies[i] = records[i].dies;
    written[i] = records[i].written;
  }
  return records.size();
}

Address ebbtide_arena_new_region(std::size_t size) { return arena().new_region(size); }

// From now on put the n-th block at `start + offsets[n]` if it has `least[n]` to `most[n]` bytes. Those that are written
// to lie in `start + [0, written)`.
void ebbtide_arena_follow(const std::int64_t* least, const std::int64_t* most, const std::int64_t* offsets,
                          std::size_t count, Address start, std::size_t written) {
  arena().follow(least, most, offsets, count, start, written);
}

// Place blocks freely again. Returns the bytes that were not put where the plan wanted them.
std::size_t ebbtide_arena_unfollow() { return arena().unfollow(); }
}
