// SPDX-License-Identifier: Apache-2.0
// Records what the GPUs do for one program. This is a library that the CUDA driver loads into a program if
// CUDA_INJECTION64_PATH names it; the program itself is not changed. So the kernels of a server and of a
// trainer on the same GPU can be recorded in the same way (gpu_timeline.py draws them).
//
// LOSSD_GPU_TRACE names a folder. The library writes <name of the program>.<process id>.csv there, with a
// line for each kernel and copy that has ended:
//
//     clock,<CUPTI's time>,<time since 1970>            // at the beginning and about once a second
//     kernel,<device>,<stream>,<begin>,<end>,<name>     // times of CUPTI
//     copy,<device>,<stream>,<begin>,<end>,<bytes>
//     end,<kernels that were lost>,<bytes left out>     // the file is full, or the program ends
//
// All times are in nanoseconds. A file has at most LOSSD_GPU_TRACE_BYTES bytes (default: 256 MiB). Recording
// costs a few microseconds a kernel, on a thread of CUPTI.
#include <cupti.h>
#include <cxxabi.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

namespace {

constexpr size_t kBufferBytes = size_t{1} << 20;
constexpr uint32_t kFlushMilliseconds = 1000;
constexpr int64_t kDefaultBytes = int64_t{256} << 20;
constexpr size_t kLongestName = 160;

// The file and what it has so far. `mutex` guards all of it: CUPTI's threads and the end of the program
// write.
struct Trace {
  std::mutex mutex;
  FILE* file = nullptr;
  int64_t bytes = 0, most = kDefaultBytes;
  int64_t left_out = 0;
  uint64_t lost = 0;
  // The key is CUPTI's pointer, which stays the same for a name.
  std::unordered_map<const char*, std::string> names;
};
Trace& TheTrace() {
  static auto* const trace = new Trace();  // never destroyed, because CUPTI's threads outlive static objects
  return *trace;
}

uint64_t Now() {
  timespec now = {};
  clock_gettime(CLOCK_REALTIME, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000 + static_cast<uint64_t>(now.tv_nsec);
}

// The name of a kernel without the parameters of templates and functions, which can have hundreds of
// characters.
std::string ShortName(const char* mangled) {
  int status = 0;
  char* const whole = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
  std::string name = status == 0 && whole != nullptr ? whole : mangled;
  free(whole);
  if (name.rfind("void ", 0) == 0) name.erase(0, 5);
  std::string text;
  int depth = 0;
  for (size_t i = 0; i < name.size(); ++i) {
    if (name.compare(i, 21, "(anonymous namespace)") == 0) {
      i += 22;  // skips the two colons after it, too
      continue;
    }
    if (name[i] == '(' && depth == 0) break;
    depth += name[i] == '<' ? 1 : 0;
    if (depth == 0) text += name[i] == ',' || name[i] == '\n' ? ' ' : name[i];
    depth -= name[i] == '>' && depth > 0 ? 1 : 0;
  }
  return text.substr(0, kLongestName);
}

void Write(Trace& trace, const std::string& line) {
  if (trace.bytes + static_cast<int64_t>(line.size()) > trace.most) {
    trace.left_out += static_cast<int64_t>(line.size());
    return;
  }
  trace.bytes += static_cast<int64_t>(line.size());
  fwrite(line.data(), 1, line.size(), trace.file);
}

std::string Line(const char* kind, uint32_t device, uint32_t stream, uint64_t begin, uint64_t end) {
  char text[128];
  snprintf(text, sizeof(text), "%s,%u,%u,%llu,%llu,", kind, device, stream,
           static_cast<unsigned long long>(begin), static_cast<unsigned long long>(end));
  return text;
}

// Writes a line that relates CUPTI's clock to the time of day. It reads both clocks several times and uses
// the reading that took the least time.
void WriteClock(Trace& trace) {
  uint64_t best = 0, at = 0, shortest = UINT64_MAX;
  for (int i = 0; i < 5; ++i) {
    uint64_t cupti = 0;
    const uint64_t before = Now();
    if (cuptiGetTimestamp(&cupti) != CUPTI_SUCCESS) return;
    const uint64_t after = Now();
    if (after - before >= shortest) continue;
    shortest = after - before;
    best = cupti;
    at = before + (after - before) / 2;
  }
  char text[80];
  snprintf(text, sizeof(text), "clock,%llu,%llu\n", static_cast<unsigned long long>(best),
           static_cast<unsigned long long>(at));
  Write(trace, text);
}

void WriteRecord(Trace& trace, const CUpti_Activity* record) {
  if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
    const auto* const kernel = reinterpret_cast<const CUpti_ActivityKernel10*>(record);
    const auto [name, is_new] = trace.names.try_emplace(kernel->name);
    if (is_new) name->second = ShortName(kernel->name);
    Write(trace, Line("kernel", kernel->deviceId, kernel->streamId, kernel->start, kernel->end) +
                     name->second + "\n");
  } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
    const auto* const copy = reinterpret_cast<const CUpti_ActivityMemcpy6*>(record);
    Write(trace, Line("copy", copy->deviceId, copy->streamId, copy->start, copy->end) +
                     std::to_string(copy->bytes) + "\n");
  }
}

// The callbacks of CUPTI: it asks for a buffer for records, and gives it back when the buffer is full or a
// period has passed.
void CUPTIAPI BufferRequested(uint8_t** buffer, size_t* size, size_t* records) {
  *buffer = static_cast<uint8_t*>(aligned_alloc(8, kBufferBytes));
  *size = *buffer == nullptr ? 0 : kBufferBytes;
  *records = 0;
}

void CUPTIAPI BufferCompleted(CUcontext context, uint32_t stream, uint8_t* buffer, size_t, size_t valid) {
  Trace& trace = TheTrace();
  {
    const std::lock_guard<std::mutex> lock(trace.mutex);
    CUpti_Activity* record = nullptr;
    while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) WriteRecord(trace, record);
    size_t dropped = 0;
    if (cuptiActivityGetNumDroppedRecords(context, stream, &dropped) == CUPTI_SUCCESS) trace.lost += dropped;
    WriteClock(trace);
    fflush(trace.file);
  }
  free(buffer);
}

// Runs at the end of the program: takes the records that CUPTI still has.
void End() {
  cuptiActivityFlushAll(1);
  Trace& trace = TheTrace();
  const std::lock_guard<std::mutex> lock(trace.mutex);
  fprintf(trace.file, "end,%llu,%lld\n", static_cast<unsigned long long>(trace.lost),
          static_cast<long long>(trace.left_out));
  fflush(trace.file);
}

bool Open(Trace& trace) {
  const char* const folder = getenv("LOSSD_GPU_TRACE");
  if (folder == nullptr || *folder == '\0') {
    fprintf(stderr, "gpu_trace: LOSSD_GPU_TRACE must name a folder; nothing is recorded\n");
    return false;
  }
  if (const char* const most = getenv("LOSSD_GPU_TRACE_BYTES"); most != nullptr) {
    trace.most = std::max(0LL, strtoll(most, nullptr, 10));
  }
  const std::string path =
      std::string(folder) + "/" + program_invocation_short_name + "." + std::to_string(getpid()) + ".csv";
  trace.file = fopen(path.c_str(), "w");
  if (trace.file == nullptr) fprintf(stderr, "gpu_trace: %s: %s\n", path.c_str(), strerror(errno));
  return trace.file != nullptr;
}

bool Succeeded(CUptiResult result, const char* call) {
  if (result == CUPTI_SUCCESS) return true;
  const char* text = nullptr;
  cuptiGetResultString(result, &text);
  fprintf(stderr, "gpu_trace: %s failed: %s; nothing is recorded\n", call, text == nullptr ? "?" : text);
  return false;
}

}  // namespace

// The CUDA driver calls this when the program initializes CUDA. Returns 1, so that the program continues.
extern "C" __attribute__((visibility("default"))) int InitializeInjection() {
  Trace& trace = TheTrace();
  const std::lock_guard<std::mutex> lock(trace.mutex);
  if (trace.file != nullptr || !Open(trace)) return 1;
  const bool recording =
      Succeeded(cuptiActivityRegisterCallbacks(BufferRequested, BufferCompleted),
                "cuptiActivityRegisterCallbacks") &&
      Succeeded(cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL), "cuptiActivityEnable(kernels)") &&
      Succeeded(cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMCPY), "cuptiActivityEnable(copies)") &&
      Succeeded(cuptiActivityFlushPeriod(kFlushMilliseconds), "cuptiActivityFlushPeriod");
  if (!recording) return 1;
  WriteClock(trace);
  atexit(End);
  return 1;
}
