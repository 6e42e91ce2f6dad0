// SPDX-License-Identifier: Apache-2.0
// Preloaded, makes a program see a kernel before Linux 6.16, which has no SO_PASSRIGHTS.
#include <dlfcn.h>
#include <sys/socket.h>

#include <cerrno>

extern "C" int setsockopt(int descriptor, int level, int option, const void* value, socklen_t size) noexcept {
  constexpr int kPassRights = 83;
  using Function = int (*)(int, int, int, const void*, socklen_t);
  static const auto next = reinterpret_cast<Function>(dlsym(RTLD_NEXT, "setsockopt"));
  if (level == SOL_SOCKET && option == kPassRights) {
    errno = ENOPROTOOPT;
    return -1;
  }
  return next(descriptor, level, option, value, size);
}
