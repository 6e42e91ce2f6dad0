// SPDX-License-Identifier: Apache-2.0
// Makes absl::Mutex, CondVar and Notification visible to the thread sanitizer.
//
// The distribution's Abseil is not instrumented, so its futex-based locks look like no synchronisation
// at all. These definitions, linked into every executable of a thread-sanitizer build and no other, take
// precedence over the shared library's (for gRPC's calls too): each calls the library's own and tells the
// sanitizer what it means.
#include <dlfcn.h>
#include <sanitizer/tsan_interface.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "absl/base/options.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"

// Provided by the sanitizer's run-time library.
extern "C" void AnnotateIgnoreReadsBegin(const char* file, int line);
extern "C" void AnnotateIgnoreReadsEnd(const char* file, int line);

#define LOSSD_TEXT2(x) #x
#define LOSSD_TEXT(x) LOSSD_TEXT2(x)

namespace {

// The library's definition of a member of namespace absl, by the rest of its mangled name.
void* Original(const char* rest) {
  const std::string inline_namespace = LOSSD_TEXT(ABSL_OPTION_INLINE_NAMESPACE_NAME);
  const std::string prefix = "4absl" + std::to_string(inline_namespace.size()) + inline_namespace;
  std::string name = rest;
  for (size_t at = name.find("$ABSL"); at != std::string::npos; at = name.find("$ABSL"))
    name.replace(at, 5, prefix);
  void* found = dlsym(RTLD_NEXT, name.c_str());
  if (found == nullptr) {
    std::fprintf(stderr, "absl_synchronization_tsan: no symbol %s\n", name.c_str());
    std::abort();
  }
  return found;
}

// While a thread gives a mutex up it may evaluate the conditions that others wait for. It still holds the
// mutex then, but the sanitizer has been told that it does not, so its reads are not to be judged.
class IgnoreReads {
 public:
  IgnoreReads() { AnnotateIgnoreReadsBegin(__FILE__, __LINE__); }
  ~IgnoreReads() { AnnotateIgnoreReadsEnd(__FILE__, __LINE__); }
};

}  // namespace

// A class-type argument that is trivially copyable and fits registers (Time, Duration) is passed to the
// original exactly as received.
#define LOSSD_ORIGINAL(Return, rest, ...) \
  static const auto original = reinterpret_cast<Return (*)(__VA_ARGS__)>(Original(rest))

namespace absl {
ABSL_NAMESPACE_BEGIN

void Mutex::Lock() {
  LOSSD_ORIGINAL(void, "_ZN$ABSL5Mutex4LockEv", Mutex*);
  original(this);
  __tsan_acquire(this);
}

void Mutex::Unlock() {
  LOSSD_ORIGINAL(void, "_ZN$ABSL5Mutex6UnlockEv", Mutex*);
  __tsan_release(this);
  const IgnoreReads ignore;
  original(this);
}

bool Mutex::TryLock() {
  LOSSD_ORIGINAL(bool, "_ZN$ABSL5Mutex7TryLockEv", Mutex*);
  const bool locked = original(this);
  if (locked) __tsan_acquire(this);
  return locked;
}

void Mutex::ReaderLock() {
  LOSSD_ORIGINAL(void, "_ZN$ABSL5Mutex10ReaderLockEv", Mutex*);
  original(this);
  __tsan_acquire(this);
}

void Mutex::ReaderUnlock() {
  LOSSD_ORIGINAL(void, "_ZN$ABSL5Mutex12ReaderUnlockEv", Mutex*);
  __tsan_release(this);
  const IgnoreReads ignore;
  original(this);
}

void Mutex::Await(const Condition& condition) {
  LOSSD_ORIGINAL(void, "_ZN$ABSL5Mutex5AwaitERKNS0_9ConditionE", Mutex*, const Condition&);
  __tsan_release(this);
  const IgnoreReads ignore;
  original(this, condition);
  __tsan_acquire(this);
}

bool Mutex::AwaitWithTimeout(const Condition& condition, Duration timeout) {
  LOSSD_ORIGINAL(bool, "_ZN$ABSL5Mutex16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE", Mutex*,
                 const Condition&, Duration);
  __tsan_release(this);
  const IgnoreReads ignore;
  const bool met = original(this, condition, timeout);
  __tsan_acquire(this);
  return met;
}

bool Mutex::AwaitWithDeadline(const Condition& condition, Time deadline) {
  LOSSD_ORIGINAL(bool, "_ZN$ABSL5Mutex17AwaitWithDeadlineERKNS0_9ConditionENS0_4TimeE", Mutex*,
                 const Condition&, Time);
  __tsan_release(this);
  const IgnoreReads ignore;
  const bool met = original(this, condition, deadline);
  __tsan_acquire(this);
  return met;
}

void CondVar::Wait(Mutex* mutex) {
  LOSSD_ORIGINAL(void, "_ZN$ABSL7CondVar4WaitEPNS0_5MutexE", CondVar*, Mutex*);
  __tsan_release(mutex);
  const IgnoreReads ignore;
  original(this, mutex);
  __tsan_acquire(mutex);
}

bool CondVar::WaitWithTimeout(Mutex* mutex, Duration timeout) {
  LOSSD_ORIGINAL(bool, "_ZN$ABSL7CondVar15WaitWithTimeoutEPNS0_5MutexENS0_8DurationE", CondVar*, Mutex*,
                 Duration);
  __tsan_release(mutex);
  const IgnoreReads ignore;
  const bool timed_out = original(this, mutex, timeout);
  __tsan_acquire(mutex);
  return timed_out;
}

bool CondVar::WaitWithDeadline(Mutex* mutex, Time deadline) {
  LOSSD_ORIGINAL(bool, "_ZN$ABSL7CondVar16WaitWithDeadlineEPNS0_5MutexENS0_4TimeE", CondVar*, Mutex*, Time);
  __tsan_release(mutex);
  const IgnoreReads ignore;
  const bool timed_out = original(this, mutex, deadline);
  __tsan_acquire(mutex);
  return timed_out;
}

// HasBeenNotified is inline: it reads the flag behind the mutex with acquire semantics.
void Notification::Notify() {
  LOSSD_ORIGINAL(void, "_ZN$ABSL12Notification6NotifyEv", Notification*);
  __tsan_release(this);
  __tsan_release(reinterpret_cast<char*>(this) + sizeof(Mutex));
  original(this);
}

void Notification::WaitForNotification() const {
  LOSSD_ORIGINAL(void, "_ZNK$ABSL12Notification19WaitForNotificationEv", const Notification*);
  original(this);
  __tsan_acquire(const_cast<Notification*>(this));
}

bool Notification::WaitForNotificationWithTimeout(Duration timeout) const {
  LOSSD_ORIGINAL(bool, "_ZNK$ABSL12Notification30WaitForNotificationWithTimeoutENS0_8DurationE",
                 const Notification*, Duration);
  const bool notified = original(this, timeout);
  if (notified) __tsan_acquire(const_cast<Notification*>(this));
  return notified;
}

bool Notification::WaitForNotificationWithDeadline(Time deadline) const {
  LOSSD_ORIGINAL(bool, "_ZNK$ABSL12Notification31WaitForNotificationWithDeadlineENS0_4TimeE",
                 const Notification*, Time);
  const bool notified = original(this, deadline);
  if (notified) __tsan_acquire(const_cast<Notification*>(this));
  return notified;
}

ABSL_NAMESPACE_END
}  // namespace absl
