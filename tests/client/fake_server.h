// SPDX-License-Identifier: Apache-2.0
// A server of lossd.v1 without any mathematics, for tests of clients: in this process, on a loopback port,
// with faults on request. It keeps the protocol's rules (order, ledger, steps, limits) independently of the
// real server, through protobuf's own encoding.
//
// What it computes, for a row with hidden states x [D] and target y:
//   loss    sum(x) + y / 4, times the row weight      dL/dx   2 x
//   lse     loss + 1                                   entropy y / 8
//   logprob -loss                                      argmax  y if the row's index is even, else y + 1
// A named class v has log-probability -v / 2; the i-th top class is y + i, with -i.
// Accumulating adds g = sum(x) to element y of the weight's first column, and 1 to the bias of y. AddGradient
// keeps the first column too.
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

// What goes wrong with one message.
struct Fault {
  int code = 0;  // a gRPC status code other than 0 ends the call with it, before the message is used
  bool detail =
      true;  // the status has a detail, as the server's own errors have; false: a broken connection's
  std::string message;       // of the status without a detail; empty: a broken connection's
  bool restart = false;      // first the server restarts, as Restart()
  bool discard = false;      // first somebody zeroes the gradients of every head
  bool new_weights = false;  // first somebody writes the weights of every head
  bool make_again = false;   // first every head is deleted and made again as it was created
  uint64_t again_with = 0;   // with make_again: the new heads have so many classes; 0: as before
  uint64_t max_rows = 0;     // not 0: replaces Options::max_slice_rows from now on
};

// What may go wrong, asked for each time it can. Called from the server's threads.
struct Faults {
  // After `accepted` was made and before it is sent.
  std::function<void(v1::MicrobatchAccepted*)> on_accepted;
  // Before the result of a slice is sent; false: do not send it.
  std::function<bool(v1::ComputeLossResponse*)> on_slice;
  // A status other than 0 ends the call instead of computing this slice (the argument counts the slices of
  // all calls from 1).
  std::function<int(uint64_t)> fail_slice;
  // The same for messages of AddGradient calls, counted from 1.
  std::function<int(uint64_t)> fail_add;
  // A failed slice or message restarts the server, as Restart().
  bool restart_on_failure = false;
  std::function<void(v1::MicrobatchSummary*)> on_summary;
  // Before the summary: what else to send.
  std::function<std::vector<v1::ComputeLossResponse>()> extra;
  bool no_summary = false;
  double slice_delay_seconds = 0;
  // Number of unary calls and streams to refuse with UNAVAILABLE.
  int refuse_calls = 0;
  int refuse_streams = 0;
  // Replaces Options::max_slice_rows. 0: off.
  uint64_t sudden_max_rows = 0;
  // Every message of ComputeLoss calls, every DescribeHead call, and every AddGradient call's messages with
  // what the call opened.
  std::function<Fault(const v1::ComputeLossRequest&)> on_request;
  std::function<Fault()> on_describe;
  std::function<Fault(const v1::OpenTensor&)> on_write;  // every WriteTensor call, when its rows are there
  std::function<Fault(const v1::OpenGradient&)> on_add;
  // Every ReadTensor call with slice 0, and then each of its slices but the first, before it is sent.
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
    bool versions = true;                // false: as a server that knows neither these nor creations
    bool histories = true;               // false: as a server of an earlier version, which describes none
  };
  FakeServer() : FakeServer(Options()) {}
  explicit FakeServer(Options options);
  ~FakeServer();

  std::string target() const;  // "127.0.0.1:port"
  int port() const;

  void SetFaults(Faults faults);
  // Makes a head with D, V, a bias and zero weights, at step 0.
  void AddHead(const std::string& name, uint64_t hidden_size, uint64_t vocab_size);
  // As a new process would be: another incarnation; accumulated gradients and the ledger are gone, heads stay
  // at their step. Connections stay.
  void Restart();
  // Closes the port and every connection; Listen opens the same port again.
  void StopListening();
  void Listen();

  uint64_t incarnation() const;
  uint64_t deletions() const;  // of checkpoints, by their ids
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
