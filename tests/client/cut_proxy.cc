#include "tests/client/cut_proxy.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <limits>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace lossd::test {
namespace {

constexpr int kPollMilliseconds = 20;

uint16_t PortOf(const std::string& target) {
  uint32_t port = 0;
  EXPECT_TRUE(absl::SimpleAtoi(target.substr(target.rfind(':') + 1), &port)) << target;
  return static_cast<uint16_t>(port);
}

sockaddr_in Loopback(uint16_t port) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  return address;
}

// Closes with a reset, so that the peers notice at once.
void Reset(int socket) {
  const linger now = {.l_onoff = 1, .l_linger = 0};
  setsockopt(socket, SOL_SOCKET, SO_LINGER, &now, sizeof(now));
  close(socket);
}

bool SendAll(int socket, const char* data, ssize_t size) {
  while (size > 0) {
    const ssize_t sent = send(socket, data, static_cast<size_t>(size), MSG_NOSIGNAL);
    if (sent <= 0) return false;
    data += sent;
    size -= sent;
  }
  return true;
}

}  // namespace

CutProxy::CutProxy(const std::string& target, uint64_t mean_bytes, uint64_t seed)
    : target_port_(PortOf(target)), mean_bytes_(mean_bytes), random_(seed) {
  listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = Loopback(0);
  socklen_t size = sizeof(address);
  EXPECT_EQ(bind(listener_, reinterpret_cast<sockaddr*>(&address), size), 0);
  EXPECT_EQ(listen(listener_, 64), 0);
  getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size);
  port_ = ntohs(address.sin_port);
  acceptor_ = std::thread([this] { Accept(); });
}

CutProxy::~CutProxy() {
  stopping_ = true;
  acceptor_.join();
  std::vector<std::thread> forwarders;
  {
    absl::MutexLock lock(&mu_);
    forwarders.swap(forwarders_);
  }
  for (std::thread& thread : forwarders) thread.join();
  close(listener_);
}

std::string CutProxy::target() const { return absl::StrCat("127.0.0.1:", port_); }

void CutProxy::Accept() {
  while (!stopping_) {
    pollfd waiting = {listener_, POLLIN, 0};
    if (poll(&waiting, 1, kPollMilliseconds) <= 0) continue;
    const int client = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (client < 0) continue;
    absl::MutexLock lock(&mu_);
    forwarders_.emplace_back([this, client] { Forward(client); });
  }
}

int64_t CutProxy::DrawBudget() {
  if (mean_bytes_ == 0) return std::numeric_limits<int64_t>::max();
  absl::MutexLock lock(&mu_);
  return static_cast<int64_t>(
      std::exponential_distribution<>(1.0 / static_cast<double>(mean_bytes_))(random_));
}

void CutProxy::Forward(int client) {
  const int server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const sockaddr_in address = Loopback(target_port_);
  int64_t budget = DrawBudget();
  bool open = connect(server, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
  while (open && !stopping_) {
    if (mean_bytes_ == 0) budget = std::numeric_limits<int64_t>::max();
    pollfd ends[] = {{client, POLLIN, 0}, {server, POLLIN, 0}};
    if (poll(ends, 2, kPollMilliseconds) <= 0) continue;
    if (ends[0].revents != 0) open = Copy(client, server, &budget);
    if (open && ends[1].revents != 0) open = Copy(server, client, &budget);
  }
  if (budget <= 0) ++cuts_;
  Reset(client);
  Reset(server);
}

bool CutProxy::Copy(int from, int to, int64_t* budget) {
  char buffer[16 << 10];
  const ssize_t size = recv(from, buffer, sizeof(buffer), 0);
  if (size <= 0) return false;
  *budget -= size;
  return *budget > 0 && SendAll(to, buffer, size);
}

}  // namespace lossd::test
