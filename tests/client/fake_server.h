// SPDX-License-Identifier: Apache-2.0
// FakeServer: a server of lossd.v1 for tests of clients that does almost no computation. It runs in this
// process, on a loopback port, and makes errors on request. It implements the protocol's rules (order,
// ledger, steps, limits) independently of the real server, and uses protobuf's own encoding.
//
// Its results for a row with hidden state x [D] and target y:
//   loss    sum(x) + y / 4, times the row weight      dL/dx   2 x
//   lse     loss + 1                                   entropy y / 8
//   logprob -loss                                      argmax  y if the row's index is even, else y + 1
// A named class v has the log-probability -v / 2. The i-th top class is y + i, with the log-probability -i.
// Accumulating adds g = sum(x) to element y of the weight's first column, and 1 to the bias of y. AddGradient
// also changes only the first column.
//
// Thread-safe. Hidden dtypes: fp32 and bf16.
#ifndef LOSSD_TESTS_CLIENT_FAKE_SERVER_H_
#define LOSSD_TESTS_CLIENT_FAKE_SERVER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lossd/v1/head.pb.h"
#include "lossd/v1/loss.pb.h"

namespace lossd::fake {

// The error with which the server answers one message.
struct Fault {
  int code = 0;  // a gRPC status code; other than 0: ends the call with it, before the message is used
  bool detail =
      true;  // the status has a detail, as the server's own errors have; false: a broken connection's
  std::string message;       // the message of a status without a detail; empty: that of a broken connection
  bool restart = false;      // first the server restarts, see Restart()
  bool discard = false;      // first another client zeroes the gradients of every head
  bool new_weights = false;  // first another client writes the weights of every head
  bool make_again = false;   // first every head is deleted and created again in the same way
  uint64_t again_with = 0;   // with make_again: the number of classes of the new heads; 0: as before
  uint64_t max_rows = 0;     // not 0: replaces Options::max_slice_rows from now on
};

// The errors that a test wants. A function is called each time when its error could happen, on a thread of
// the server.
struct Faults {
  // Called before the acceptance of a microbatch is sent; may change it.
  std::function<void(v1::MicrobatchAccepted*)> on_accepted;
  // Called before the result of a slice is sent. False: the result is not sent.
  std::function<bool(v1::ComputeLossResponse*)> on_slice;
  // Called for each slice, with its number; slices of all calls are counted from 1. A status code other than
  // 0 ends the call instead of computing the slice.
  std::function<int(uint64_t)> fail_slice;
  // The same for messages of AddGradient calls, which are counted from 1.
  std::function<int(uint64_t)> fail_add;
  // Whether a slice or message that fails also restarts the server, see Restart().
  bool restart_on_failure = false;
  std::function<void(v1::MicrobatchSummary*)> on_summary;
  // Called before the summary: returns further messages to send.
  std::function<std::vector<v1::ComputeLossResponse>()> extra;
  bool no_summary = false;
  double slice_delay_seconds = 0;
  // The number of unary calls, and of streams, to refuse with UNAVAILABLE.
  int refuse_calls = 0;
  int refuse_streams = 0;
  // Replaces Options::max_slice_rows. 0: off.
  uint64_t sudden_max_rows = 0;
  // Called for every message of ComputeLoss calls, every DescribeHead call, and every message of AddGradient
  // calls (with the opening message of the call).
  std::function<Fault(const v1::ComputeLossRequest&)> on_request;
  std::function<Fault()> on_describe;
  // Every WriteTensor call, after its rows have arrived.
  std::function<Fault(const v1::OpenTensor&)> on_write;
  std::function<Fault(const v1::OpenGradient&)> on_add;
  // Called for every ReadTensor call with slice 0, and then before each of its further slices is sent.
  std::function<Fault(uint64_t slice)> on_read;
  std::function<Fault(const v1::ApplyStepRequest&)> on_apply;
  std::function<Fault(const v1::ResetHeadRequest&)> on_reset;
};

class FakeServer {
 public:
  struct Options {
    uint64_t max_slice_rows = 1000;
    uint64_t max_slice_bytes = 1 << 20;
    int port = 0;                        // 0: any
    bool numbered_incarnations = false;  // 1, 2, ... instead of random ones
    bool versions = true;                // false: the server knows neither weight versions nor creations
    bool histories = true;               // false: the server has no head histories, like an earlier version
  };
  FakeServer() : FakeServer(Options()) {}
  explicit FakeServer(Options options);
  ~FakeServer();

  std::string target() const;  // "127.0.0.1:port"
  int port() const;

  void SetFaults(Faults faults);
  // Makes a head with D, V, a bias and zero weights, at step 0.
  void AddHead(const std::string& name, uint64_t hidden_size, uint64_t vocab_size);
  // Makes the server behave like a new process: it has another incarnation, the accumulated gradients and the
  // ledger are gone, and heads keep their step. Connections stay open.
  void Restart();
  // Closes the port and every connection; Listen opens the same port again.
  void StopListening();
  void Listen();

  uint64_t incarnation() const;
  uint64_t deletions() const;  // deleted checkpoints; a repeated call with the same id counts once
  uint64_t streams_opened() const;
  uint64_t describes() const;  // DescribeHead calls answered
  uint64_t slices_received() const;
  uint64_t rows_received() const;                     // in slices
  double accumulated(const std::string& head) const;  // sum over the weight's gradient

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace lossd::fake

#endif  // LOSSD_TESTS_CLIENT_FAKE_SERVER_H_
