// SPDX-License-Identifier: Apache-2.0
// A process that embeds a server: it loads liblossd.so and otherwise behaves as the program lossd does, so
// that suites which start, kill and drain that program do the same to a server inside another process
// (LOSSD_TEST_PROGRAM, LOSSD_BINARY). Flags are `--name=text`, `--name` and `--noname`; --port_file and
// --log_format are the process's own, and all others go to lossd_start.
//
// Exit status as that of lossd: 0 after a drain, 1 if the server cannot start, 2 for a wrong option, 3 if the
// device is lost.
#include <dlfcn.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "server/app/lossd.h"

namespace {

constexpr int kInvalidArgument = 3;  // of gRPC
constexpr double kDrainSeconds = 30.0;

struct Library {
  decltype(&lossd_start) start = nullptr;
  decltype(&lossd_address) address = nullptr;
  decltype(&lossd_http_address) http_address = nullptr;
  decltype(&lossd_wait) wait = nullptr;
  decltype(&lossd_drain) drain = nullptr;
  decltype(&lossd_stop) stop = nullptr;
  decltype(&lossd_free) free = nullptr;

  // False: standard error says why.
  bool Load(const char* path) {
    void* const handle = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
    const bool complete = handle != nullptr && Find(handle, "lossd_start", start) &&
                          Find(handle, "lossd_address", address) &&
                          Find(handle, "lossd_http_address", http_address) &&
                          Find(handle, "lossd_wait", wait) && Find(handle, "lossd_drain", drain) &&
                          Find(handle, "lossd_stop", stop) && Find(handle, "lossd_free", free);
    if (!complete) std::cerr << "lossd: " << dlerror() << std::endl;
    return complete;
  }

  template <typename Function>
  static bool Find(void* handle, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(handle, name));
    return function != nullptr;
  }
};

// The flags of the command line by name; of those that are given twice the last one counts.
std::map<std::string, std::string> ReadFlags(int argc, char** argv) {
  std::map<std::string, std::string> flags;
  for (int i = 1; i < argc; ++i) {
    std::string flag = argv[i];
    flag.erase(0, flag.find_first_not_of('-'));
    const size_t equals = flag.find('=');
    if (equals != std::string::npos) {
      flags[flag.substr(0, equals)] = flag.substr(equals + 1);
    } else if (flag.rfind("no", 0) == 0) {
      flags[flag.substr(2)] = "false";
    } else {
      flags[flag] = "true";
    }
  }
  return flags;
}

std::string Taken(std::map<std::string, std::string>& flags, const std::string& name) {
  const auto found = flags.find(name);
  if (found == flags.end()) return "";
  std::string value = found->second;
  flags.erase(found);
  return value;
}

}  // namespace

int main(int argc, char** argv) {
  // Only the thread below takes these, and the library's threads inherit that.
  sigset_t ends;
  sigemptyset(&ends);
  sigaddset(&ends, SIGTERM);
  sigaddset(&ends, SIGINT);
  pthread_sigmask(SIG_BLOCK, &ends, nullptr);
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN);
  Library library;
  if (!library.Load(LOSSD_LIBRARY)) return 1;
  std::map<std::string, std::string> flags = ReadFlags(argc, argv);
  const std::string port_file = Taken(flags, "port_file");
  Taken(flags, "log_format");
  std::vector<std::string> texts;
  for (const auto& [name, text] : flags) texts.push_back(name + "=" + text);
  std::vector<const char*> options;
  for (const std::string& text : texts) options.push_back(text.c_str());
  options.push_back(nullptr);
  int code = 0;
  char* error = nullptr;
  lossd_server* const server = library.start(options.data(), &code, &error);
  if (server == nullptr) {
    std::cerr << "lossd: " << error << std::endl;
    library.free(error);
    return code == kInvalidArgument ? 2 : 1;
  }
  if (!port_file.empty()) {
    const std::string written = port_file + ".new";
    std::ofstream(written) << nlohmann::json{{"grpc", library.address(server)},
                                             {"http", library.http_address(server)}};
    if (std::rename(written.c_str(), port_file.c_str()) != 0) return 1;
  }
  std::atomic<bool> asked = false;
  std::thread end([&] {
    int number = 0;
    sigwait(&ends, &number);
    asked = true;
    library.drain(server, kDrainSeconds);
  });
  if (library.wait(server, -1.0) == LOSSD_DEVICE_LOST) {
    std::cerr << "lossd: the device is lost" << std::endl;
    _exit(3);
  }
  if (asked) end.join();  // else another rank has ended the server
  library.stop(server);
  _exit(0);
}
