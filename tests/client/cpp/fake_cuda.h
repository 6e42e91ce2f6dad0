// SPDX-License-Identifier: Apache-2.0
// A simulated machine with GPUs for tests. This is a library with the name of CUDA's driver (libcuda.so.1)
// that has the functions that the client loads from the driver, and functions by which tests control the
// machine. A program that links it, or finds it by LD_LIBRARY_PATH, loads it in place of a driver.
//
// How it differs from a driver:
// - An address of device n is a host address plus n + 1 times 2^60, so code that dereferences it ends with
//   SIGSEGV.
// - Device n has the UUID GPU-00000000-0000-0000-0000-00000000000m with m = n + 1.
// - Memory that other processes export is a memfd.
// - Work on a stream is done when an event or the stream is waited for, so code that does not wait does not
//   see the results.
// - These are errors: a copy beyond the memory of its device, a copy that touches imported memory to which
//   the current context's device has no access, and a call without a context.
// - A copy to or from another device that the current device cannot reach takes a detour, as with a driver.
//
// Thread-safe.
#ifndef LOSSD_TESTS_CLIENT_CPP_FAKE_CUDA_H_
#define LOSSD_TESTS_CLIENT_CPP_FAKE_CUDA_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

namespace lossd::test::fake_cuda {

inline constexpr uint64_t kFar = uint64_t{1} << 60;

// Sets the number of GPUs; initially 2.
void SetDevices(int devices);

// Creates a stream that belongs to the test. Its work is done when something waits for it.
void* NewStream();
void EndStream(void* stream);
// Enqueues on the stream a copy of host bytes to memory of a GPU, or of zeros if `from` is null.
void Give(void* stream, uint8_t* to, const void* from, size_t bytes);
// The number of operations on the stream that are not done yet.
size_t Pending(void* stream);

// Sets whether the GPUs can reach each other's memory; initially they can.
void SetConnected(bool connected);

// Sets the performance rank of the connection of two GPUs, in both directions. 0, the initial rank, is the
// best.
void SetRank(int one, int other, int rank);
// Makes a device current for the calling thread, as in a program that has chosen it.
void EnterDevice(int device);
void LeaveDevice();

// Makes the next `count` calls of this driver function fail, as when the GPU is lost. "copy to region" and
// "copy from region" mean copies to and from imported memory.
void Fail(const std::string& function, int64_t count);

// The objects that the driver has given out and that were not given back: their number by kind. The kinds are
// "handle", "reservation", "mapping", "allocation", "stream", "event" and "pinned" (registered host memory).
// Kinds without objects are left out.
std::map<std::string, int> Held();
// The depth of this thread's stack of contexts.
int ContextDepth();

// How often this driver function was called.
int64_t Calls(const std::string& function);

// The number of copies since the last call of TakeCopied.
uint64_t Copies();
// The bytes that were copied since the last call, by the kinds "host to device", "device to host" and "device
// to device", and for registered host memory "pinned to device" and "device to pinned".
std::map<std::string, uint64_t> TakeCopied();

// The bytes that were copied from GPU to GPU since the last call. The key "1 to 0 by 1" names the GPU that
// had them, the GPU that got them, and the GPU that did the work. It ends with ", by a detour" if the working
// GPU could not reach the other's memory.
std::map<std::string, uint64_t> TakeCopiedBetween();

// The same functions for programs in other languages (tests/client/python/fake_cuda.py). The counterparts of
// Held and TakeCopied return the value for one kind.
extern "C" {
void lossd_fake_cuda_set_devices(int devices);
void lossd_fake_cuda_set_connected(int connected);
void lossd_fake_cuda_set_rank(int one, int other, int rank);
void lossd_fake_cuda_enter_device(int device);
void lossd_fake_cuda_leave_device();
void lossd_fake_cuda_fail(const char* function, int64_t count);
int lossd_fake_cuda_held(const char* kind);
int64_t lossd_fake_cuda_calls(const char* function);
int64_t lossd_fake_cuda_take_copied(const char* way);
int64_t lossd_fake_cuda_take_copied_between(const char* way);
void* lossd_fake_cuda_new_stream();
void lossd_fake_cuda_end_stream(void* stream);
void lossd_fake_cuda_give(void* stream, uint64_t to, const void* from, uint64_t bytes);
int64_t lossd_fake_cuda_pending(void* stream);
}

}  // namespace lossd::test::fake_cuda

#endif  // LOSSD_TESTS_CLIENT_CPP_FAKE_CUDA_H_
