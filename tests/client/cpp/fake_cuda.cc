// SPDX-License-Identifier: Apache-2.0
#include "tests/client/cpp/fake_cuda.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace lossd::test::fake_cuda {

// ---- What the GPUs are made of ----
// Shared by the functions of the driver and what tests ask for.

using Address = unsigned long long;

enum Result {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kPeerUnsupported = 217,
  kNotReady = 600,
  kIllegalAddress = 700,
  kPeerAlreadyEnabled = 704,
  kAlreadyRegistered = 712,
  kNotRegistered = 713
};

struct Location {
  int type;
  int id;
};
struct Access {
  Location location;
  int flags;
};

// A copy, or a fill if there is no source.
struct Work {
  Address to = 0;
  std::optional<Address> from;
  size_t bytes = 0;
  int by = 0;  // whose work it is
};
struct Stream {
  std::vector<Work> work;
  size_t taken = 0;  // of all that it was given before
};
struct Event {
  Stream* recorded = nullptr;
  size_t given = 0;  // what the stream had been given then
};

// Memory of a device, at its address.
struct Range {
  size_t bytes = 0;
  int device = 0;
  bool reserved = false;     // else allocated
  bool mapped = false;       // the rest is of memory that is reserved
  std::set<int> accessible;  // to these devices
};

struct Machine {
  std::mutex mutex;  // guards all
  int devices = 2;
  bool connected = true;
  std::set<std::pair<int, int>> peers;       // the first one reaches what the second one allocates
  std::map<std::pair<int, int>, int> ranks;  // of what connects two devices, 0 being the fastest
  std::map<std::string, int64_t> failures;
  std::map<std::string, int64_t> calls;
  std::map<Address, size_t> pinned;  // memory of the host, and its bytes
  std::map<Address, Range> ranges;
  std::set<int> handles;  // descriptors of this library
  std::set<Stream*> streams;
  std::set<Event*> events;
  std::map<std::string, uint64_t> copied;
  std::map<std::string, uint64_t> copied_between;
  uint64_t copies = 0;
};

Machine& machine();

// The thread's devices. The context of device n is at the address n + 1.
extern thread_local std::vector<int> contexts;

inline bool IsFar(Address address) { return address >= kFar; }
// Whether the address is in memory of the host that GPUs copy to and from directly.
bool IsPinned(const Machine& machine, Address address);
inline uint8_t* OnHost(Address address) { return reinterpret_cast<uint8_t*>(address % kFar); }

// The memory that the address is in; null: it is of the host, or nowhere. `left`: bytes from there on.
const Range* Find(const Machine& machine, Address address, size_t* left);
// Memory of the current device; 0 if there is none.
Address NewRange(Machine& all, size_t bytes, int protection, bool reserved);

// Whether this call is to fail.
bool Fails(Machine& machine, const std::string& function);
// What most functions of the driver do: `body` with the lock, unless the call is to fail.
template <typename Body>
int Do(const char* function, bool needs_context, Body body) {
  Machine& all = machine();
  const std::lock_guard lock(all.mutex);
  ++all.calls[function];
  if (needs_context && contexts.empty()) return kInvalidContext;
  return Fails(all, function) ? kIllegalAddress : body(all);
}

int Enqueue(const char* function, void* stream, Work work);
// What the stream has been given, up to `end` of it, which counts as done.
std::vector<Work> Take(Machine& all, Stream* stream, size_t end = ~size_t{0});
// The same for what an event stands for, if its stream is still there.
std::vector<Work> TakeUntil(Machine& all, const Event& event);
// Does it; without the lock, as several streams work at once.
void Finish(const std::vector<Work>& all);

namespace {

// Whether work of this device may touch so many bytes.
bool MayTouch(const Machine& machine, Address address, size_t bytes, int by) {
  if (!IsFar(address)) return true;
  size_t left = 0;
  const Range* const range = Find(machine, address, &left);
  return range != nullptr && left >= bytes && (!range->reserved || range->accessible.count(by) > 0);
}

// Whether the device gets there without a detour.
bool Reaches(const Machine& machine, int device, const Range& range) {
  if (range.reserved) return range.accessible.count(device) > 0;
  return range.device == device || machine.peers.count({device, range.device}) > 0;
}

void CountBetween(Machine& all, const Work& work) {
  size_t left = 0;
  if (!IsFar(work.to) || !IsFar(*work.from)) return;
  const Range* const to = Find(all, work.to, &left);
  const Range* const from = Find(all, *work.from, &left);
  if (to == nullptr || from == nullptr || to->device == from->device) return;
  const bool direct = Reaches(all, work.by, *to) && Reaches(all, work.by, *from);
  all.copied_between[std::to_string(from->device) + " to " + std::to_string(to->device) + " by " +
                     std::to_string(work.by) + (direct ? "" : ", by a detour")] += work.bytes;
}

bool InRegion(const Machine& machine, Address address) {
  size_t left = 0;
  const Range* const range = Find(machine, address, &left);
  return range != nullptr && range->reserved;
}

std::string NameOf(const Machine& machine, Address address) {
  if (IsFar(address)) return "device";
  return IsPinned(machine, address) ? "pinned" : "host";
}

}  // namespace

Machine& machine() {
  static auto* const machine = new Machine();
  return *machine;
}

thread_local std::vector<int> contexts;

bool Fails(Machine& machine, const std::string& function) {
  const auto found = machine.failures.find(function);
  if (found == machine.failures.end() || found->second == 0) return false;
  --found->second;
  return true;
}

bool IsPinned(const Machine& machine, Address address) {
  const auto after = machine.pinned.upper_bound(address);
  return after != machine.pinned.begin() && address - std::prev(after)->first < std::prev(after)->second;
}

const Range* Find(const Machine& machine, Address address, size_t* left) {
  auto found = machine.ranges.upper_bound(address);
  if (found == machine.ranges.begin()) return nullptr;
  --found;
  if (address - found->first >= found->second.bytes) return nullptr;
  *left = found->second.bytes - (address - found->first);
  return &found->second;
}

int Enqueue(const char* function, void* stream, Work work) {
  return Do(function, true, [&](Machine& all) {
    work.by = contexts.back();
    if (InRegion(all, work.to) && Fails(all, "copy to region")) return kIllegalAddress;
    if (work.from.has_value() && InRegion(all, *work.from) && Fails(all, "copy from region"))
      return kIllegalAddress;
    if (all.streams.count(static_cast<Stream*>(stream)) == 0 || work.bytes == 0) return kInvalidValue;
    if (!MayTouch(all, work.to, work.bytes, work.by)) return kInvalidValue;
    if (work.from.has_value() && !MayTouch(all, *work.from, work.bytes, work.by)) return kInvalidValue;
    if (!work.from.has_value() && !IsFar(work.to)) return kInvalidValue;
    static_cast<Stream*>(stream)->work.push_back(work);
    return kSuccess;
  });
}

void Finish(const std::vector<Work>& all) {
  for (const Work& work : all) {
    if (work.from.has_value()) {
      std::memmove(OnHost(work.to), OnHost(*work.from), work.bytes);
    } else {
      std::memset(OnHost(work.to), 0, work.bytes);
    }
  }
}

std::vector<Work> Take(Machine& all, Stream* stream, size_t end) {
  const size_t count = std::min(end - std::min(end, stream->taken), stream->work.size());
  const auto middle = stream->work.begin() + static_cast<std::ptrdiff_t>(count);
  const std::vector<Work> taken(stream->work.begin(), middle);
  stream->work.erase(stream->work.begin(), middle);
  stream->taken += count;
  for (const Work& work : taken) {
    if (!work.from.has_value()) continue;
    all.copied[NameOf(all, *work.from) + " to " + NameOf(all, work.to)] += work.bytes;
    CountBetween(all, work);
    ++all.copies;
  }
  return taken;
}

std::vector<Work> TakeUntil(Machine& all, const Event& event) {
  if (all.streams.count(event.recorded) == 0) return {};
  return Take(all, event.recorded, event.given);
}

Address NewRange(Machine& all, size_t bytes, int protection, bool reserved) {
  void* const at = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return 0;
  const int device = contexts.back();
  const Address address = reinterpret_cast<Address>(at) + static_cast<Address>(device + 1) * kFar;
  all.ranges[address] = {.bytes = bytes, .device = device, .reserved = reserved};
  return address;
}

void SetDevices(int devices) {
  const std::lock_guard lock(machine().mutex);
  machine().devices = devices;
}

void* NewStream() {
  const std::lock_guard lock(machine().mutex);
  return *machine().streams.insert(new Stream()).first;
}

void EndStream(void* stream) {
  Machine& all = machine();
  const std::lock_guard lock(all.mutex);
  Finish(Take(all, static_cast<Stream*>(stream)));  // what it has been given is done all the same
  all.streams.erase(static_cast<Stream*>(stream));
  delete static_cast<Stream*>(stream);
}

void Give(void* stream, uint8_t* to, const void* from, size_t bytes) {
  const std::lock_guard lock(machine().mutex);
  Work work{.to = reinterpret_cast<Address>(to), .from = std::nullopt, .bytes = bytes};
  if (from != nullptr) work.from = reinterpret_cast<Address>(from);
  static_cast<Stream*>(stream)->work.push_back(work);
}

size_t Pending(void* stream) {
  const std::lock_guard lock(machine().mutex);
  return static_cast<Stream*>(stream)->work.size();
}

void SetRank(int one, int other, int rank) {
  Machine& all = machine();
  const std::lock_guard lock(all.mutex);
  all.ranks[{one, other}] = all.ranks[{other, one}] = rank;
}

void EnterDevice(int device) { contexts.push_back(device); }
void LeaveDevice() { contexts.pop_back(); }

void SetConnected(bool connected) {
  const std::lock_guard lock(machine().mutex);
  machine().connected = connected;
  if (!connected) machine().peers.clear();
}

void Fail(const std::string& function, int64_t count) {
  const std::lock_guard lock(machine().mutex);
  machine().failures[function] = count;
}

std::map<std::string, int> Held() {
  Machine& all = machine();
  const std::lock_guard lock(all.mutex);
  std::map<std::string, int> held;
  const auto add = [&held](const char* kind, size_t count) {
    if (count > 0) held[kind] += static_cast<int>(count);
  };
  add("handle", all.handles.size());
  add("stream", all.streams.size());
  add("event", all.events.size());
  add("pinned", all.pinned.size());
  for (const auto& [address, range] : all.ranges) {
    add(range.reserved ? "reservation" : "allocation", 1);
    add("mapping", range.mapped);
  }
  return held;
}

int ContextDepth() { return static_cast<int>(contexts.size()); }

int64_t Calls(const std::string& function) {
  const std::lock_guard lock(machine().mutex);
  return machine().calls[function];
}

uint64_t Copies() {
  const std::lock_guard lock(machine().mutex);
  return machine().copies;
}

std::map<std::string, uint64_t> TakeCopied() {
  const std::lock_guard lock(machine().mutex);
  machine().copies = 0;
  return std::exchange(machine().copied, {});
}

std::map<std::string, uint64_t> TakeCopiedBetween() {
  const std::lock_guard lock(machine().mutex);
  return std::exchange(machine().copied_between, {});
}

void lossd_fake_cuda_set_devices(int devices) { SetDevices(devices); }

void lossd_fake_cuda_set_connected(int connected) { SetConnected(connected != 0); }

void lossd_fake_cuda_set_rank(int one, int other, int rank) { SetRank(one, other, rank); }

void lossd_fake_cuda_enter_device(int device) { EnterDevice(device); }

void lossd_fake_cuda_leave_device() { LeaveDevice(); }

void lossd_fake_cuda_fail(const char* function, int64_t count) { Fail(function, count); }

int lossd_fake_cuda_held(const char* kind) {
  const std::map<std::string, int> held = Held();
  const auto found = held.find(kind);
  return found == held.end() ? 0 : found->second;
}

int64_t lossd_fake_cuda_calls(const char* function) { return Calls(function); }

int64_t lossd_fake_cuda_take_copied(const char* way) {
  const std::lock_guard lock(machine().mutex);
  return static_cast<int64_t>(std::exchange(machine().copied[way], 0));
}

int64_t lossd_fake_cuda_take_copied_between(const char* way) {
  const std::lock_guard lock(machine().mutex);
  return static_cast<int64_t>(std::exchange(machine().copied_between[way], 0));
}

void* lossd_fake_cuda_new_stream() { return NewStream(); }

void lossd_fake_cuda_end_stream(void* stream) { EndStream(stream); }

void lossd_fake_cuda_give(void* stream, uint64_t to, const void* from, uint64_t bytes) {
  Give(stream, reinterpret_cast<uint8_t*>(to), from, bytes);
}

int64_t lossd_fake_cuda_pending(void* stream) { return static_cast<int64_t>(Pending(stream)); }

// ---- The functions of CUDA's driver that fake_cuda.h stands for, by the names that its library has ----

extern "C" {

int cuInit(unsigned) {
  return Do("cuInit", false, [](Machine&) { return kSuccess; });
}

int cuGetErrorString(int result, const char** text) {
  *text = result == kIllegalAddress   ? "an illegal memory access was encountered"
          : result == kInvalidValue   ? "invalid argument"
          : result == kInvalidContext ? "invalid device context"
                                      : nullptr;
  return *text == nullptr ? kInvalidValue : kSuccess;
}

int cuDeviceGetCount(int* count) {
  return Do("cuDeviceGetCount", false, [&](Machine& all) {
    *count = all.devices;
    return kSuccess;
  });
}

int cuDeviceGetUuid_v2(void* uuid, int device) {
  return Do("cuDeviceGetUuid", false, [&](Machine& all) {
    if (device < 0 || device >= all.devices) return kInvalidDevice;
    std::memset(uuid, 0, 16);
    static_cast<uint8_t*>(uuid)[15] = static_cast<uint8_t>(device + 1);
    return kSuccess;
  });
}

int cuDeviceGetP2PAttribute(int* value, int attribute, int from, int to) {
  return Do("cuDeviceGetP2PAttribute", false, [&](Machine& all) {
    if (from < 0 || from >= all.devices || to < 0 || to >= all.devices) return kInvalidDevice;
    if (from == to || (attribute != 1 && attribute != 2)) return kInvalidValue;
    const auto rank = all.ranks.find({from, to});
    *value = attribute == 2 ? static_cast<int>(all.connected) : rank == all.ranks.end() ? 0 : rank->second;
    return kSuccess;
  });
}

int cuCtxGetDevice(int* device) {
  if (contexts.empty()) return kInvalidContext;
  *device = contexts.back();
  return kSuccess;
}

int cuPointerGetAttribute(void* value, int attribute, Address address) {
  return Do("cuPointerGetAttribute", false, [&](Machine& all) {
    size_t left = 0;
    const Range* const range = Find(all, address, &left);
    if (attribute != 9 || range == nullptr) return kInvalidValue;
    *static_cast<int*>(value) = range->device;
    return kSuccess;
  });
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
  return Do("cuDevicePrimaryCtxRetain", false, [&](Machine& all) {
    if (device < 0 || device >= all.devices) return kInvalidDevice;
    *context = reinterpret_cast<void*>(static_cast<intptr_t>(device + 1));
    return kSuccess;
  });
}

int cuCtxPushCurrent_v2(void* context) {
  return Do("cuCtxPushCurrent", false, [&](Machine&) {
    contexts.push_back(static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1);
    return kSuccess;
  });
}

int cuCtxPopCurrent_v2(void** context) {
  if (contexts.empty()) return kInvalidContext;
  *context = reinterpret_cast<void*>(static_cast<intptr_t>(contexts.back() + 1));
  contexts.pop_back();
  return kSuccess;
}

int cuCtxEnablePeerAccess(void* context, unsigned flags) {
  return Do("cuCtxEnablePeerAccess", true, [&](Machine& all) {
    const int peer = static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1;
    if (flags != 0 || peer < 0 || peer >= all.devices || peer == contexts.back()) return kInvalidValue;
    if (!all.connected) return kPeerUnsupported;
    return all.peers.insert({contexts.back(), peer}).second ? kSuccess : kPeerAlreadyEnabled;
  });
}

int cuMemImportFromShareableHandle(Address* handle, void* descriptor, int type) {
  return Do("cuMemImportFromShareableHandle", true, [&](Machine& all) {
    const int copy = fcntl(static_cast<int>(reinterpret_cast<intptr_t>(descriptor)), F_DUPFD_CLOEXEC, 0);
    if (type != 1 || copy < 0) return kInvalidValue;
    all.handles.insert(copy);
    *handle = static_cast<Address>(copy);
    return kSuccess;
  });
}

int cuMemRelease(Address handle) {
  return Do("cuMemRelease", true, [&](Machine& all) {
    if (all.handles.erase(static_cast<int>(handle)) == 0) return kInvalidValue;
    close(static_cast<int>(handle));
    return kSuccess;
  });
}

int cuMemAddressReserve(Address* address, size_t bytes, size_t, Address, unsigned long long) {
  return Do("cuMemAddressReserve", true, [&](Machine& all) {
    *address = NewRange(all, bytes, PROT_NONE, /*reserved=*/true);
    return *address == 0 ? kOutOfMemory : kSuccess;
  });
}

int cuMemAddressFree(Address address, size_t bytes) {
  return Do("cuMemAddressFree", true, [&](Machine& all) {
    const auto range = all.ranges.find(address);
    if (range == all.ranges.end() || range->second.bytes != bytes || range->second.mapped)
      return kInvalidValue;
    munmap(OnHost(address), bytes);
    all.ranges.erase(range);
    return kSuccess;
  });
}

int cuMemMap(Address address, size_t bytes, size_t offset, Address handle, unsigned long long) {
  return Do("cuMemMap", true, [&](Machine& all) {
    const auto range = all.ranges.find(address);
    const int descriptor = static_cast<int>(handle);
    struct stat status = {};
    if (range == all.ranges.end() || range->second.bytes != bytes || range->second.mapped || offset != 0 ||
        all.handles.count(descriptor) == 0 || fstat(descriptor, &status) != 0 ||
        static_cast<size_t>(status.st_size) < bytes)
      return kInvalidValue;
    void* const at =
        mmap(OnHost(address), bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, descriptor, 0);
    range->second.mapped = at != MAP_FAILED;
    return range->second.mapped ? kSuccess : kOutOfMemory;
  });
}

int cuMemSetAccess(Address address, size_t bytes, const void* access, size_t count) {
  return Do("cuMemSetAccess", true, [&](Machine& all) {
    const auto range = all.ranges.find(address);
    const Access& wanted = *static_cast<const Access*>(access);
    if (range == all.ranges.end() || range->second.bytes != bytes || !range->second.mapped || count != 1 ||
        wanted.location.type != 1 || wanted.location.id < 0 || wanted.location.id >= all.devices ||
        wanted.flags != 3)
      return kInvalidValue;
    if (wanted.location.id != range->second.device && !all.connected) return kPeerUnsupported;
    range->second.accessible.insert(wanted.location.id);
    return kSuccess;
  });
}

int cuMemUnmap(Address address, size_t bytes) {
  return Do("cuMemUnmap", true, [&](Machine& all) {
    const auto range = all.ranges.find(address);
    if (range == all.ranges.end() || range->second.bytes != bytes || !range->second.mapped)
      return kInvalidValue;
    mmap(OnHost(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    range->second.mapped = false;
    range->second.accessible.clear();
    return kSuccess;
  });
}

int cuMemAlloc_v2(Address* address, size_t bytes) {
  return Do("cuMemAlloc", true, [&](Machine& all) {
    *address = NewRange(all, bytes, PROT_READ | PROT_WRITE, /*reserved=*/false);
    return *address == 0 ? kOutOfMemory : kSuccess;
  });
}

int cuMemFree_v2(Address address) {
  return Do("cuMemFree", true, [&](Machine& all) {
    const auto range = all.ranges.find(address);
    if (range == all.ranges.end() || range->second.reserved) return kInvalidValue;
    munmap(OnHost(address), range->second.bytes);
    all.ranges.erase(range);
    return kSuccess;
  });
}

int cuMemHostRegister_v2(void* memory, size_t bytes, unsigned flags) {
  return Do("cuMemHostRegister", true, [&](Machine& all) {
    const auto begin = reinterpret_cast<Address>(memory);
    const uint64_t page = sysconf(_SC_PAGESIZE);
    // For all GPUs, and whole pages that are mapped.
    if (flags != 1 || bytes == 0 || begin % page != 0 || bytes % page != 0 ||
        msync(memory, bytes, MS_ASYNC) != 0)
      return kInvalidValue;
    const auto after = all.pinned.lower_bound(begin);
    if (IsPinned(all, begin) || (after != all.pinned.end() && after->first < begin + bytes))
      return kAlreadyRegistered;
    all.pinned[begin] = bytes;
    return kSuccess;
  });
}

int cuMemHostUnregister(void* memory) {
  return Do("cuMemHostUnregister", true, [&](Machine& all) {
    const auto found = all.pinned.find(reinterpret_cast<Address>(memory));
    if (found == all.pinned.end()) return kNotRegistered;
    if (msync(memory, found->second, MS_ASYNC) != 0) return kInvalidValue;  // it was unmapped before
    all.pinned.erase(found);
    return kSuccess;
  });
}

int cuMemcpyAsync(Address to, Address from, size_t bytes, void* stream) {
  return Enqueue("cuMemcpyAsync", stream, {.to = to, .from = from, .bytes = bytes});
}

int cuMemsetD8Async(Address to, unsigned char value, size_t bytes, void* stream) {
  if (value != 0) return kInvalidValue;
  return Enqueue("cuMemsetD8Async", stream, {.to = to, .from = std::nullopt, .bytes = bytes});
}

int cuStreamCreate(void** stream, unsigned flags) {
  return Do("cuStreamCreate", true, [&](Machine& all) {
    if (flags != 1) return kInvalidValue;
    *stream = *all.streams.insert(new Stream()).first;
    return kSuccess;
  });
}

int cuStreamSynchronize(void* stream) {
  std::vector<Work> work;
  const int result = Do("cuStreamSynchronize", true, [&](Machine& all) {
    if (all.streams.count(static_cast<Stream*>(stream)) == 0) return kInvalidValue;
    work = Take(all, static_cast<Stream*>(stream));
    return kSuccess;
  });
  Finish(work);
  return result;
}

int cuStreamDestroy_v2(void* stream) {
  return Do("cuStreamDestroy", true, [&](Machine& all) {
    if (all.streams.erase(static_cast<Stream*>(stream)) == 0) return kInvalidValue;
    delete static_cast<Stream*>(stream);
    return kSuccess;
  });
}

int cuEventCreate(void** event, unsigned flags) {
  return Do("cuEventCreate", true, [&](Machine& all) {
    if (flags != 3) return kInvalidValue;  // who waits takes no CPU time
    *event = *all.events.insert(new Event()).first;
    return kSuccess;
  });
}

int cuEventRecord(void* event, void* stream) {
  return Do("cuEventRecord", true, [&](Machine& all) {
    if (all.events.count(static_cast<Event*>(event)) == 0) return kInvalidValue;
    auto* const recorded = static_cast<Stream*>(stream);
    // The default streams, which are given nothing here: that of the device, the legacy one, that of the
    // thread.
    if (reinterpret_cast<uintptr_t>(stream) <= 2) {
      *static_cast<Event*>(event) = {};
      return kSuccess;
    }
    if (all.streams.count(recorded) == 0) return kInvalidValue;
    *static_cast<Event*>(event) = {recorded, recorded->taken + recorded->work.size()};
    return kSuccess;
  });
}

int cuEventQuery(void* event) {
  return Do("cuEventQuery", true, [&](Machine& all) {
    if (all.events.count(static_cast<Event*>(event)) == 0) return kInvalidValue;
    const Event& asked = *static_cast<Event*>(event);
    const bool over = all.streams.count(asked.recorded) == 0 || asked.recorded->taken >= asked.given;
    return over ? kSuccess : kNotReady;
  });
}

int cuEventSynchronize(void* event) {
  std::vector<Work> work;
  const int result = Do("cuEventSynchronize", true, [&](Machine& all) {
    if (all.events.count(static_cast<Event*>(event)) == 0) return kInvalidValue;
    work = TakeUntil(all, *static_cast<Event*>(event));
    return kSuccess;
  });
  Finish(work);
  return result;
}

// What the stream is to wait for is done here, as nothing can be done before it.
int cuStreamWaitEvent(void* stream, void* event, unsigned flags) {
  return Do("cuStreamWaitEvent", true, [&](Machine& all) {
    if (all.streams.count(static_cast<Stream*>(stream)) == 0 ||
        all.events.count(static_cast<Event*>(event)) == 0 || flags != 0)
      return kInvalidValue;
    Finish(TakeUntil(all, *static_cast<Event*>(event)));
    return kSuccess;
  });
}

int cuEventDestroy_v2(void* event) {
  return Do("cuEventDestroy", true, [&](Machine& all) {
    if (all.events.erase(static_cast<Event*>(event)) == 0) return kInvalidValue;
    delete static_cast<Event*>(event);
    return kSuccess;
  });
}

}  // extern "C"

}  // namespace lossd::test::fake_cuda
