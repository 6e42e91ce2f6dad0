// SPDX-License-Identifier: Apache-2.0
#include "tests/client/cpp/fake_cuda.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <utility>

#include "tests/client/cpp/fake_cuda_machine.h"

namespace lossd::test::fake_cuda {
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

void lossd_fake_cuda_fail(const char* function, int64_t count) { Fail(function, count); }

int lossd_fake_cuda_held(const char* kind) {
  const std::map<std::string, int> held = Held();
  const auto found = held.find(kind);
  return found == held.end() ? 0 : found->second;
}

int lossd_fake_cuda_context_depth() { return ContextDepth(); }

void lossd_fake_cuda_set_connected(int connected) { SetConnected(connected != 0); }

int64_t lossd_fake_cuda_take_copied_between(const char* way) {
  const std::lock_guard lock(machine().mutex);
  return static_cast<int64_t>(std::exchange(machine().copied_between[way], 0));
}

}  // namespace lossd::test::fake_cuda
