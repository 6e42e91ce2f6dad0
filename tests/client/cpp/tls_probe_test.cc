#include "client/cpp/tls_probe.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace lossd::client::internal {
namespace {

constexpr absl::string_view kSettings("\0\0\0\x04\0\0\0\0\0", 9);

// A server on a port of its own that says the same to both connections of a probe, and closes them.
class Speaker {
 public:
  explicit Speaker(absl::string_view words) : listener_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(listen(listener_, 4), 0);
    socklen_t length = sizeof(address);
    getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &length);
    target_ = absl::StrCat("127.0.0.1:", ntohs(address.sin_port));
    thread_ = std::thread([this, words = std::string(words)] { Run(words); });
  }
  ~Speaker() {
    shutdown(listener_, SHUT_RDWR);
    thread_.join();
    close(listener_);
  }
  const std::string& target() const { return target_; }

 private:
  void Run(const std::string& words) const {
    while (true) {
      const int connection = accept(listener_, nullptr, nullptr);
      if (connection < 0) return;
      send(connection, words.data(), words.size(), MSG_NOSIGNAL);
      shutdown(connection, SHUT_WR);
      char heard[256];
      while (recv(connection, heard, sizeof(heard), 0) > 0) continue;
      close(connection);
    }
  }

  const int listener_;
  std::string target_;
  std::thread thread_;
};

Speech Heard(absl::string_view words) {
  const Speaker speaker(words);
  return ProbeTls(speaker.target(), "").speech;
}

TEST(TlsProbeTest, KnowsHttp2ByItsSettings) { EXPECT_EQ(Heard(kSettings), Speech::kPlain); }

TEST(TlsProbeTest, KnowsNothingElse) {
  EXPECT_EQ(Heard(""), Speech::kNothing);
  EXPECT_EQ(Heard(kSettings.substr(0, 8)), Speech::kNothing);
  EXPECT_EQ(Heard("HTTP/1.1 400 Bad Request\r\n\r\n"), Speech::kNothing);
  EXPECT_EQ(Heard("220 mail.example.com ESMTP\r\n"), Speech::kNothing);
  for (const size_t wrong : {0, 3, 5, 8}) {  // length, type, stream
    std::string frame(kSettings);
    frame[wrong] = 7;
    EXPECT_EQ(Heard(frame), Speech::kNothing) << wrong;
  }
  for (const char* target : {"", "nowhere", "unix:/run/lossd", "127.0.0.1:1"}) {
    EXPECT_EQ(ProbeTls(target, "").speech, Speech::kNothing) << target;
  }
}

}  // namespace
}  // namespace lossd::client::internal
