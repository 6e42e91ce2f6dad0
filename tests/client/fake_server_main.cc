// SPDX-License-Identifier: Apache-2.0
// The fake server as a process of its own: prints its address, serves until its input ends. Head "head": D =
// 64, V = 1000.
//
// With --scripted the first line of its input is the script of a ScriptedServer, as JSON; for each further
// line it prints the log, as one line of JSON.
#include <cstdio>
#include <exception>
#include <iostream>
#include <string>

#include "tests/client/fake_server.h"
#include "tests/client/scripted_server.h"

namespace {

void Serve() {
  lossd::fake::FakeServer server;
  server.AddHead("head", 64, 1000);
  std::cout << server.target() << std::endl;
  while (std::getchar() != EOF) {
  }
}

void ServeScript() {
  std::string line;
  std::getline(std::cin, line);
  const lossd::fake::ScriptedServer server(nlohmann::json::parse(line));
  std::cout << server.target() << std::endl;
  while (std::getline(std::cin, line)) std::cout << server.Log().dump() << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  const bool scripted = argc == 2 && std::string(argv[1]) == "--scripted";
  if (argc > 1 && !scripted) {
    std::cerr << "usage: fake_server [--scripted]\n";
    return 2;
  }
  try {
    scripted ? ServeScript() : Serve();
  } catch (const std::exception& error) {
    std::cerr << "fake_server: " << error.what() << "\n";
    return 1;
  }
  return 0;
}
