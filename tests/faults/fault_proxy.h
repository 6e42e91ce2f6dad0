// SPDX-License-Identifier: Apache-2.0
// FaultProxy: a proxy that disturbs connections where a test asks for it. It breaks them at a given byte or
// between two given messages, makes them stand still, or makes them slow. If the server listens on a Unix
// socket, the proxy does, too; otherwise the proxy listens on a TCP port of the loopback.
//
// Thread-safe.
#ifndef LOSSD_TESTS_FAULTS_FAULT_PROXY_H_
#define LOSSD_TESTS_FAULTS_FAULT_PROXY_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "tests/support/temp_folder.h"

namespace lossd::test {

enum class Direction { kToServer = 0, kToClient = 1 };

// A disturbance that happens once, at one place of the traffic.
struct Fault {
  enum class Unit { kBytes, kMessages };
  enum class Action {
    kReset,  // the connection breaks with a TCP reset; a Unix socket has none and is closed
    kClose,  // the connection is closed in order, as when a process ends
    kHold,   // the connection stands still until Heal is called
    // Refuses the call to which the last message or header belongs, as a server without memory for it does:
    // the call's client gets RST_STREAM with ENHANCE_YOUR_CALM, its server one with CANCEL. The connection
    // and other calls go on. The refusal waits until a message or header ends in both directions.
    kRefuse,
    kNone,  // traffic goes on
  };

  // The place of the disturbance. It is reached when `after` bytes, or `after` ends of gRPC messages or
  // headers, have passed in this direction since the fault was armed, on all connections together. The
  // connection that carries the last of them is disturbed, before any further byte passes.
  Direction direction = Direction::kToServer;
  Unit unit = Unit::kMessages;
  int64_t after = 0;
  Action action = Action::kReset;
  std::function<void()> call;  // optional; runs first, on the connection's thread
};

class FaultProxy {
 public:
  // Forwards to `target` ("127.0.0.1:port" or "unix:PATH").
  FaultProxy(const std::string& target, uint64_t seed);
  ~FaultProxy();
  FaultProxy(const FaultProxy&) = delete;
  FaultProxy& operator=(const FaultProxy&) = delete;

  const std::string& target() const { return target_; }
  // Sets the server to which later connections are forwarded.
  void SetServer(const std::string& target);

  // Arms a fault, and disarms the fault before it.
  void Arm(Fault fault);
  // Arms next(), and arms next() again whenever that fault has happened. next() is called on threads of the
  // proxy, one call at a time.
  void ArmEach(std::function<Fault()> next);
  // Whether the last armed fault has happened. If its `call` is running, waits for the end of it.
  bool fired() const;
  // Delays everything that arrives by a random time of at most `most`.
  void Delay(absl::Duration most);
  // Disarms the fault, ends the delays, and lets held connections go on.
  void Heal();

  // The number of connections that faults have broken or closed.
  int64_t cuts() const { return cuts_; }
  // The number of calls that faults have refused.
  int64_t refusals() const { return refusals_; }
  // The number of ends of messages and headers that have passed.
  int64_t messages(Direction direction) const;
  // The number of bytes that have passed, by direction.
  std::array<int64_t, 2> bytes() const;

 private:
  struct Connection;
  struct Happening;
  struct Forwarder {
    std::atomic<bool> done{false};
    std::thread thread;
  };

  void Accept();
  void Forward(int client);
  bool Copy(Connection& connection, Direction direction);
  // Refuses the call that is to be refused, if both directions are between two frames. False if the
  // connection ends.
  bool RefuseIfPossible(Connection& connection);
  // Counts how much of `bytes` bytes, with boundaries at `ends`, passes. If the armed fault happens among
  // them, returns it.
  std::optional<Happening> Pass(Direction direction, size_t bytes, absl::Span<const size_t> ends);
  // Carries out a fault on the connection. False if that ends the connection.
  bool Act(Connection& connection, const Happening& happening);
  std::string server() const;
  int64_t heals() const;
  absl::Duration DrawDelay();

  TempFolder folder_;  // has the Unix socket, if there is one
  std::string target_;
  int listener_ = -1;
  std::atomic<int64_t> cuts_{0};
  std::atomic<int64_t> refusals_{0};
  std::atomic<bool> stopping_{false};

  mutable absl::Mutex mu_;
  std::string server_ ABSL_GUARDED_BY(mu_);
  std::mt19937_64 random_ ABSL_GUARDED_BY(mu_);
  absl::Duration delay_ ABSL_GUARDED_BY(mu_);
  std::optional<Fault> armed_ ABSL_GUARDED_BY(mu_);
  std::function<Fault()> next_ ABSL_GUARDED_BY(mu_);
  bool fired_ ABSL_GUARDED_BY(mu_) = false;
  bool calling_ ABSL_GUARDED_BY(mu_) = false;
  int64_t heals_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t passed_ ABSL_GUARDED_BY(mu_) = 0;  // since the fault was armed, in its direction and unit
  std::array<int64_t, 2> messages_ ABSL_GUARDED_BY(mu_) = {0, 0};
  std::array<int64_t, 2> bytes_ ABSL_GUARDED_BY(mu_) = {0, 0};
  std::list<Forwarder> forwarders_;  // the acceptor thread adds to it, and later the destructor uses it
  std::thread acceptor_;
};

// MessageBoundaries finds where headers and gRPC messages end in the bytes that one side of an HTTP/2
// connection sends. At these places, between two messages, a connection may break or a process may die.
// Thread-compatible.
class MessageBoundaries {
 public:
  // `from_client`: the side that starts with HTTP/2's connection preface.
  explicit MessageBoundaries(bool from_client);

  // Takes the next bytes of the connection. Returns the boundaries among them, ascending: for each the number
  // of bytes before it, in [1, bytes.size()].
  std::vector<size_t> Take(absl::Span<const uint8_t> bytes);

  // Whether the bytes so far end between two frames. And the stream of the last frame with a header or data;
  // 0 if there was none.
  bool between_frames() const { return preface_left_ == 0 && header_bytes_ == 0 && !continues_; }
  uint32_t last_stream() const { return last_stream_; }

 private:
  // The gRPC message that a stream is sending: five bytes (compressed?, length), then the message.
  struct Message {
    size_t prefix_bytes = 0;
    uint32_t length = 0;
    uint64_t bytes_left = 0;
  };

  void TakeHeaderByte(uint8_t byte);
  // Takes bytes of a DATA frame's payload, at most to the end of the message, and stores their number in
  // `taken`. True if the message has ended.
  static bool TakeMessage(Message& message, absl::Span<const uint8_t> payload, size_t* taken);

  size_t preface_left_;
  // The present frame.
  size_t header_bytes_ = 0;  // of 9
  uint32_t payload_left_ = 0;
  uint8_t type_ = 0;
  uint8_t flags_ = 0;
  uint32_t stream_ = 0;
  uint32_t last_stream_ = 0;
  bool continues_ = false;                // a CONTINUATION frame must follow
  std::map<uint32_t, Message> messages_;  // by stream
};

}  // namespace lossd::test

#endif  // LOSSD_TESTS_FAULTS_FAULT_PROXY_H_
