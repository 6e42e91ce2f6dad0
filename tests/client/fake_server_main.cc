// The fake server as a process of its own, for trying clients by hand: prints its address, serves until its
// input ends. Head "head": D = 64, V = 1000.
#include <cstdio>

#include "tests/client/fake_server.h"

int main() {
  lossd::fake::FakeServer server;
  server.AddHead("head", 64, 1000);
  std::printf("%s\n", server.target().c_str());
  std::fflush(stdout);
  while (std::getchar() != EOF) {
  }
  return 0;
}
