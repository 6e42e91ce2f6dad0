// SPDX-License-Identifier: Apache-2.0
// The functions of CUDA's driver that fake_cuda.h stands for, by the names that its library has.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <utility>

#include "tests/client/cpp/fake_cuda_machine.h"

namespace lossd::test::fake_cuda {

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
    if (recorded == nullptr) {  // the default stream, which is given nothing here
      *static_cast<Event*>(event) = {};
      return kSuccess;
    }
    if (all.streams.count(recorded) == 0) return kInvalidValue;
    *static_cast<Event*>(event) = {recorded, recorded->taken + recorded->work.size()};
    return kSuccess;
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
