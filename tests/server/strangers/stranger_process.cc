// SPDX-License-Identifier: Apache-2.0
// A program of another user without any secret, and what it does to sockets that it can reach:
//
//   stranger_process ACT COUNT DONE USER SOCKET...
//
// Becomes USER (a number; its own: stays who it is), connects to every SOCKET COUNT times, does ACT on each
// connection, writes "done" and how often it could connect into the file DONE, and keeps what it has open
// until it is killed. A SOCKET is tcp:HOST:PORT, stream:NAME or packets:NAME (a Unix socket's path, or "@"
// and a name in the abstract namespace). A socket that lets it not in counts as done.
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr size_t kMostDescriptors = 253;  // that a packet brings

struct Socket {
  bool packets = false;
  bool is_unix = false;
  sockaddr_storage address = {};
  socklen_t size = 0;
};

Socket Parse(const std::string& text) {
  Socket socket;
  const size_t colon = text.find(':');
  const std::string kind = text.substr(0, colon);
  const std::string name = text.substr(colon + 1);
  if (kind == "tcp") {
    const size_t port = name.rfind(':');
    if (name.find(':') != port) {
      auto& address = reinterpret_cast<sockaddr_in6&>(socket.address);
      address.sin6_family = AF_INET6;
      inet_pton(AF_INET6, name.substr(0, port).c_str(), &address.sin6_addr);
      address.sin6_port = htons(static_cast<uint16_t>(std::atoi(name.substr(port + 1).c_str())));
      socket.size = sizeof(address);
    } else {
      auto& address = reinterpret_cast<sockaddr_in&>(socket.address);
      address.sin_family = AF_INET;
      inet_pton(AF_INET, name.substr(0, port).c_str(), &address.sin_addr);
      address.sin_port = htons(static_cast<uint16_t>(std::atoi(name.substr(port + 1).c_str())));
      socket.size = sizeof(address);
    }
    return socket;
  }
  socket.is_unix = true;
  socket.packets = kind == "packets";
  auto& address = reinterpret_cast<sockaddr_un&>(socket.address);
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, name.data(), name.size());
  if (name[0] == '@') address.sun_path[0] = '\0';
  socket.size =
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name.size() + (name[0] == '@' ? 0 : 1));
  return socket;
}

// Waits at most a second for a full backlog to empty.
int Connect(const Socket& to) {
  const int made =
      socket(to.address.ss_family, (to.packets ? SOCK_SEQPACKET : SOCK_STREAM) | SOCK_CLOEXEC, 0);
  if (made < 0) return -1;
  const timeval patience = {.tv_sec = 1, .tv_usec = 0};
  setsockopt(made, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
  bool is_bound = true;
  if (to.address.ss_family == AF_INET) {
    // From another address of the loopback each time: that must not make the stranger several.
    static uint32_t connections = 0;
    const int one = 1;
    setsockopt(made, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &one, sizeof(one));
    sockaddr_in from = {.sin_family = AF_INET};
    from.sin_addr.s_addr = htonl(INADDR_LOOPBACK + ++connections % 200);
    is_bound = bind(made, reinterpret_cast<const sockaddr*>(&from), sizeof(from)) == 0;
  }
  if (is_bound && connect(made, reinterpret_cast<const sockaddr*>(&to.address), to.size) == 0) return made;
  close(made);
  return -1;
}

void Send(int socket, const std::string& bytes) {
  size_t sent = 0;
  while (sent < bytes.size()) {
    const ssize_t part = send(socket, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (part <= 0) return;
    sent += static_cast<size_t>(part);
  }
}

bool SendDescriptors(int socket, const std::vector<int>& descriptors, const std::string& bytes) {
  std::vector<char> control(CMSG_SPACE(descriptors.size() * sizeof(int)));
  iovec data = {.iov_base = const_cast<char*>(bytes.data()), .iov_len = bytes.size()};
  msghdr message = {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* const part = CMSG_FIRSTHDR(&message);
  part->cmsg_level = SOL_SOCKET;
  part->cmsg_type = SCM_RIGHTS;
  part->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
  std::memcpy(CMSG_DATA(part), descriptors.data(), descriptors.size() * sizeof(int));
  return sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0;
}

void SetLinger(int socket, bool on) {
  const linger wait = {.l_onoff = on ? 1 : 0, .l_linger = on ? 600 : 0};
  setsockopt(socket, SOL_SOCKET, SO_LINGER, &wait, sizeof(wait));
}

// A TCP socket that whoever closes it last waits for: it lingers, and the other end, which stays open here,
// takes nothing of what is still to be sent.
int LingeringSocket() {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {.sin_family = AF_INET};
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  if (bind(listener, reinterpret_cast<sockaddr*>(&address), size) != 0 || listen(listener, 1) != 0 ||
      getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    return -1;
  }
  const int made = socket(AF_INET, SOCK_STREAM, 0);
  if (connect(made, reinterpret_cast<sockaddr*>(&address), size) != 0) return -1;
  accept(listener, nullptr, nullptr);
  close(listener);
  SetLinger(made, true);
  const std::vector<char> block(1 << 16);
  while (send(made, block.data(), block.size(), MSG_NOSIGNAL | MSG_DONTWAIT) > 0) {
  }
  return made;
}

std::string Beginning(const Socket& of) {
  return of.packets ? std::string("\x08")
                    : std::string("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", 33);
}

void Act(const std::string& act, const Socket& to, int connection, int number) {
  if (act == "half") Send(connection, Beginning(to).substr(0, to.packets ? 1 : 17));
  if (act == "much") {
    for (int i = 0; i < 100; ++i) Send(connection, std::string(1 << 16, static_cast<char>('A' + i % 50)));
  }
  if (act == "descriptors" && to.is_unix) {
    std::vector<int> many;
    for (size_t i = 0; i < kMostDescriptors; ++i) many.push_back(eventfd(0, EFD_CLOEXEC));
    for (int i = 0; i < 3; ++i) SendDescriptors(connection, many, Beginning(to));
    for (const int one : many) close(one);
  }
  if (act == "lingering" && to.is_unix) {
    for (int i = 0; i < 3; ++i) {
      const int one = LingeringSocket();
      if (!SendDescriptors(connection, {one}, i == 0 ? Beginning(to) : "x")) SetLinger(one, false);
      std::thread([one] { close(one); }).detach();  // which waits itself if the server was faster
    }
    if (number % 2 == 0) close(connection);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 6) return 2;
  signal(SIGPIPE, SIG_IGN);
  const std::string act = argv[1];
  const int count = std::atoi(argv[2]);
  FILE* const done = std::fopen(argv[3], "we");
  const auto user = static_cast<uid_t>(std::atoi(argv[4]));
  rlimit limit = {};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  if (done == nullptr || (user != getuid() && (setgid(user) != 0 || setuid(user) != 0))) return 3;
  std::vector<Socket> sockets;
  for (int i = 5; i < argc; ++i) sockets.push_back(Parse(argv[i]));
  int connected = 0;
  for (const Socket& socket : sockets) {
    for (int i = 0; i < count; ++i) {
      const int connection = Connect(socket);
      if (connection < 0) break;
      ++connected;
      Act(act, socket, connection, i);
    }
  }
  std::fprintf(done, "done %d\n", connected);
  std::fclose(done);
  while (true) pause();
}
