// SPDX-License-Identifier: Apache-2.0
// A machine with GPUs for tests: a library under the name of CUDA's driver (libcuda.so.1), with the functions
// that the client takes from it, and what tests ask it for. A program that links it, or finds it by
// LD_LIBRARY_PATH, loads it in place of a driver.
//
// An address of device n is one of the host plus n + 1 times 2^60, so whoever follows it ends with SIGSEGV.
// Device n has the UUID GPU-00000000-0000-0000-0000-00000000000m with m = n + 1, and memory that other
// processes export is a memfd. Work on a stream is done when an event or the stream is waited for, so whoever
// does not wait sees none of it. A copy that leaves the memory of its device, or touches memory that was
// imported and that the current context's device has no access to, and a call without a context, is an error.
// A copy to or from other memory of a device that the current one does not reach takes a detour, as there.
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

// How many GPUs there are; 2 at the beginning.
void SetDevices(int devices);

// A stream of a program's own, whose work is done when something waits for it.
void* NewStream();
void EndStream(void* stream);
// Gives it a copy of bytes of the host to memory of a GPU, or zeros (null).
void Give(void* stream, uint8_t* to, const void* from, size_t bytes);
// How much that it was given is not done yet.
size_t Pending(void* stream);

// Whether the GPUs reach each other's memory; they do at the beginning.
void SetConnected(bool connected);

// How good the connection of two GPUs is, to the other GPU and back: 0, as at the beginning, is the best.
void SetRank(int one, int other, int rank);
// The calling thread's device, as a program that has chosen one has it.
void EnterDevice(int device);
void LeaveDevice();

// The next `count` calls of this function of the driver fail, as when the GPU is lost. "copy to region" and
// "copy from region" are copies to and from memory that is imported.
void Fail(const std::string& function, int64_t count);

// Of each kind of thing that the driver gives out, how many there are and have not been given back: "handle",
// "reservation", "mapping", "allocation", "stream", "event"; "pinned": memory of the host that is registered.
// Kinds without any are left out.
std::map<std::string, int> Held();
// How deep the stack of contexts of this thread is.
int ContextDepth();

// How often this function of the driver was called.
int64_t Calls(const std::string& function);

// How many copies were made since the last call of TakeCopied.
uint64_t Copies();
// Bytes that were copied since the last call, by "host to device", "device to host", "device to device", and
// "pinned to device", "device to pinned" where memory of the host is registered.
std::map<std::string, uint64_t> TakeCopied();

// Bytes that were copied from GPU to GPU since the last call, by "1 to 0 by 1": which of them had it, which
// got it, and whose work it was; with ", by a detour" at its end if that one did not reach the other's
// memory.
std::map<std::string, uint64_t> TakeCopiedBetween();

// The same for programs in other languages (tests/client/python/fake_cuda.py). Held: of one kind; bytes that
// were copied: of one way.
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
