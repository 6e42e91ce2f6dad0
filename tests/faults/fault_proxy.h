// SPDX-License-Identifier: Apache-2.0
// A proxy that makes trouble where a test asks for it: connections that break at a given byte or between two
// given messages, that stand still or are slow. Before a server that listens on a Unix socket it is a Unix
// socket too, else a TCP port of the loopback.
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

// What happens once, at one place of the traffic.
struct Fault {
  enum class Unit { kBytes, kMessages };
  enum class Action {
    kReset,  // the connection breaks with a TCP reset; a Unix socket has none and is closed
    kClose,  // the connection is closed in order, as by a process that ends
    kHold,   // the connection stands still until Heal
    // The call whose message or header came last is refused as by a server without memory for it: its client
    // gets RST_STREAM with ENHANCE_YOUR_CALM, its server one with CANCEL. The connection and other calls go
    // on. Only where a message or header ends in both directions; until it does, the refusal waits.
    kRefuse,
    kNone,  // traffic goes on
  };

  // The place: `after` bytes, or ends of gRPC messages or headers, have passed in this direction since the
  // fault was armed, on all connections together. The connection that carries the last of them is the one
  // affected; not a byte more passes before.
  Direction direction = Direction::kToServer;
  Unit unit = Unit::kMessages;
  int64_t after = 0;
  Action action = Action::kReset;
  std::function<void()> call;  // if any: runs first, on the connection's thread
};

class FaultProxy {
 public:
  // Forwards to `target` ("127.0.0.1:port" or "unix:PATH").
  FaultProxy(const std::string& target, uint64_t seed);
  ~FaultProxy();
  FaultProxy(const FaultProxy&) = delete;
  FaultProxy& operator=(const FaultProxy&) = delete;

  const std::string& target() const { return target_; }
  // Where connections made from now on lead.
  void SetServer(const std::string& target);

  // Arms a fault in place of the one armed before.
  void Arm(Fault fault);
  // Arms next(), and again whenever that fault has happened: on threads of the proxy, one at a time.
  void ArmEach(std::function<Fault()> next);
  // Whether the fault armed last has happened. Waits for its call, if that is running.
  bool fired() const;
  // Everything that arrives is held for a random time up to this.
  void Delay(absl::Duration most);
  // Disarms, delays no more and lets held connections go on.
  void Heal();

  // Connections broken or closed by faults.
  int64_t cuts() const { return cuts_; }
  // Calls refused by faults.
  int64_t refusals() const { return refusals_; }
  // Ends of messages and headers that have passed.
  int64_t messages(Direction direction) const;
  // Bytes that have passed, by direction.
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
  // Refuses the call that waits for it, if both sides are between two frames; false if the connection ends.
  bool RefuseIfPossible(Connection& connection);
  // Counts what passes of `bytes` bytes with boundaries at `ends`. If the armed fault happens among them:
  // that.
  std::optional<Happening> Pass(Direction direction, size_t bytes, absl::Span<const size_t> ends);
  // What a fault does to the connection; false if that ends it.
  bool Act(Connection& connection, const Happening& happening);
  std::string server() const;
  int64_t heals() const;
  absl::Duration DrawDelay();

  TempFolder folder_;  // of the Unix socket, if it is one
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
  int64_t passed_ ABSL_GUARDED_BY(mu_) = 0;  // in the armed fault's direction and unit
  std::array<int64_t, 2> messages_ ABSL_GUARDED_BY(mu_) = {0, 0};
  std::array<int64_t, 2> bytes_ ABSL_GUARDED_BY(mu_) = {0, 0};
  std::list<Forwarder> forwarders_;  // the acceptor's; after it, the destructor's
  std::thread acceptor_;
};

// Finds in the bytes that one side of an HTTP/2 connection sends where headers and gRPC messages end: the
// places between two messages, at which a connection may break or a process may die.
// Thread-compatible.
class MessageBoundaries {
 public:
  // `from_client`: the side that starts with HTTP/2's connection preface.
  explicit MessageBoundaries(bool from_client);

  // Takes the next bytes of the connection. Returns how many of them stand before each boundary, ascending,
  // each in [1, bytes.size()].
  std::vector<size_t> Take(absl::Span<const uint8_t> bytes);

  // Whether a frame could follow what was taken, and the stream of the last frame that had a header or data;
  // 0 if there was none.
  bool between_frames() const { return preface_left_ == 0 && header_bytes_ == 0 && !continues_; }
  uint32_t last_stream() const { return last_stream_; }

 private:
  // What has been seen of the gRPC message a stream is in: five bytes (compressed?, length), then the
  // message.
  struct Message {
    size_t prefix_bytes = 0;
    uint32_t length = 0;
    uint64_t bytes_left = 0;
  };

  void TakeHeaderByte(uint8_t byte);
  // Takes bytes of a DATA frame's payload up to the end of the message, if it is among them, and says how
  // many that were; true if the message ended.
  static bool TakeMessage(Message& message, absl::Span<const uint8_t> payload, size_t* taken);

  size_t preface_left_;
  // The frame under way.
  size_t header_bytes_ = 0;  // of 9
  uint32_t payload_left_ = 0;
  uint8_t type_ = 0;
  uint8_t flags_ = 0;
  uint32_t stream_ = 0;
  uint32_t last_stream_ = 0;
  bool continues_ = false;                // a CONTINUATION has to follow
  std::map<uint32_t, Message> messages_;  // by stream
};

}  // namespace lossd::test

#endif  // LOSSD_TESTS_FAULTS_FAULT_PROXY_H_
