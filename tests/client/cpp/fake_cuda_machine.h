// SPDX-License-Identifier: Apache-2.0
// What the GPUs of fake_cuda.h are made of: shared by the functions of the driver and what tests ask for.
#ifndef LOSSD_TESTS_CLIENT_CPP_FAKE_CUDA_MACHINE_H_
#define LOSSD_TESTS_CLIENT_CPP_FAKE_CUDA_MACHINE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/client/cpp/fake_cuda.h"

namespace lossd::test::fake_cuda {

using Address = unsigned long long;

enum Result {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kPeerUnsupported = 217,
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
  std::set<std::pair<int, int>> peers;  // the first one reaches what the second one allocates
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

}  // namespace lossd::test::fake_cuda

#endif  // LOSSD_TESTS_CLIENT_CPP_FAKE_CUDA_MACHINE_H_
