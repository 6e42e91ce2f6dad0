// SPDX-License-Identifier: Apache-2.0
// Loaded into a server (LD_PRELOAD), makes it leak memory, descriptors and threads, a little of each ten
// times a second: what a soak run has to find.
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

namespace {

constexpr size_t kLeakedBytes = 1 << 20;
constexpr useconds_t kPause = 100'000;  // microseconds

// Signals go to the server's own threads.
void BlockSignals() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

void* SleepForEver(void*) {
  while (true) pause();
  return nullptr;
}

void Start(void* (*body)(void*)) {
  pthread_t thread;
  if (pthread_create(&thread, nullptr, body, nullptr) == 0) pthread_detach(thread);
}

void* Leak(void*) {
  BlockSignals();  // for its threads too
  while (true) {
    usleep(kPause);
    if (void* const memory = std::malloc(kLeakedBytes); memory != nullptr) {
      std::memset(memory, 1, kLeakedBytes);
      asm volatile("" : : "r"(memory) : "memory");  // it is not optimised away
    }
    (void)!open("/dev/null", O_RDONLY | O_CLOEXEC);
    Start(SleepForEver);
  }
  return nullptr;
}

__attribute__((constructor)) void Plant() { Start(Leak); }

}  // namespace
