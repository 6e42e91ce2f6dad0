// SPDX-License-Identifier: Apache-2.0
/* The C interface of the client, in liblossd.so, for languages that load a library; the Python package uses
 * it. It does what the C++ client does (client/cpp/client.h). liblossd.so also has the C interface of the
 * server (server/app/lossd.h).
 *
 *   lossd_call* call = lossd_call_new(0);
 *   const char* const options[] = {"target=127.0.0.1:7070", NULL};
 *   lossd_client* client = lossd_client_new();
 *   lossd_client_connect(client, options, call);
 *   lossd_call_wait(call, -1);
 *   lossd_call_result(call, &result);
 *   if (result.code != 0) { fprintf(stderr, "%s\n", result.message); ... }
 *
 * A `lossd_call` is the handle of one function that was called with it: it has the status and the answer of
 * the function, and can end the function early. Use a new lossd_call for each function; only
 * lossd_client_enter, lossd_check_loss and lossd_client_compute of one loss computation share one. Requests
 * and answers are serialized messages of the protocol (proto/lossd/v1). Times are seconds, sizes are bytes.
 * Rows are laid out as in client_options.h.
 *
 * Status codes are gRPC's: 0 OK, 3 INVALID_ARGUMENT and so on. Messages, details and repeats are those of the
 * C++ client. Errors name options and arguments as the Python client does: "channels", "targets".
 *
 * All functions are thread-safe, with two rules. After lossd_call_free or lossd_client_free, do not use the
 * object any more. Free all calls that name a client before the client. A child of fork() must not call any
 * function with a client of its parent. */
#ifndef LOSSD_CLIENT_LIBRARY_LOSSD_CLIENT_H_
#define LOSSD_CLIENT_LIBRARY_LOSSD_CLIENT_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lossd_client lossd_client;
typedef struct lossd_call lossd_call;

/* ---- Calls ---- */

/* Makes a call. If `blocks`, a function that otherwise begins its work and returns at once does all its work
 * on the calling thread before it returns. Loss computations do not block in any case. */
lossd_call* lossd_call_new(int blocks);
/* Ends the call early with CANCELLED. Has no effect if the call has ended. If the function of the call has
 * not begun, the call ends at once, and the function then does nothing. */
void lossd_call_cancel(lossd_call* call);
/* Waits until the call has ended, for at most `seconds`; a negative number means without a limit. Returns 1
 * if the call has ended, else 0. */
int lossd_call_wait(lossd_call* call, double seconds);
/* The result of a call that has ended. Its texts and bytes belong to the call. */
typedef struct lossd_result {
  int32_t code;        /* status code */
  int32_t reason;      /* if ABORTED: 1: the server was restarted; 2: gradients were discarded; else 0 */
  const char* message; /* the message of an error */
  const void* detail;  /* the lossd.v1.ErrorDetail of an error; NULL if it has none */
  uint64_t detail_size;
  const void* answer; /* the answer, if the status is OK */
  uint64_t answer_size;
  /* For a loss computation with status OK: its loss and its costs. */
  double loss;
  double wall_seconds;
  uint64_t sent_bytes;
  uint64_t received_bytes;
  int32_t streams;
  int32_t repeats;
} lossd_result;

void lossd_call_result(const lossd_call* call, lossd_result* result);
/* The newest lossd.v1.SaveProgress of a SaveCheckpoint call; NULL if there is none since this function was
 * last called. The bytes are valid until the next such call of this function. */
const void* lossd_call_progress(lossd_call* call, size_t* size);
/* Ends the call early, waits for its end, and frees it. */
void lossd_call_free(lossd_call* call);

/* ---- Clients ---- */

/* `options`, here and in lossd_client_connect, is an array of texts "name=value" with NULL at its end. Names
 * and meaning are those of ClientOptions, CredentialOptions and RetryOptions (client_options.h), with times
 * in seconds: target, ca, cert, key, token, transport, run, channels, connect_timeout, wait_for_server,
 * max_message_bytes, call_timeout, transfer_timeout, loss_timeout, dead_peer_timeout, max_attempts,
 * initial_backoff, max_backoff, shared_memory_bytes and expected_incarnation; and context: the name of a
 * server in the file of named servers (client/cpp/contexts.h). Options about the server that are not given
 * come from the environment and from the named server; other options have their defaults. INVALID_ARGUMENT
 * names an option that is wrong or unknown.
 *
 * lossd_client_complete completes the options about the server. Its answer is seven texts, each with its NUL:
 * target, ca, cert, key, token, transport and run. */
void lossd_client_complete(const char* const* options, lossd_call* call);

lossd_client* lossd_client_new(void);
/* Begins to connect a new client and returns at once; to be called once for a client. The call ends when the
 * client is connected, or with the error that says why it is not. It is also an error if the server does not
 * know this client or gives it no role. With the transport "cuda_ipc" the client opens memory of the GPU that
 * the calling thread works on. */
void lossd_client_connect(lossd_client* client, const char* const* options, lossd_call* call);
/* Ends the calls under way, waits for their end, and closes the connections. Later calls end with CANCELLED.
 * `call` ends when the client is closed. If `call` is NULL, the function returns only when the client is
 * closed. */
void lossd_client_close(lossd_client* client, lossd_call* call);
/* Closes the client and frees it. */
void lossd_client_free(lossd_client* client);

/* The request of one method of the services. Members that a method does not need are 0. */
typedef struct lossd_request {
  const char* method;  /* "CreateHead", "DescribeHead", "ApplyStep", ... */
  const char* message; /* the serialized request; OpenTensor of WriteTensor, OpenGradient of AddGradient */
  uint64_t message_size;
  void* payload; /* ReadTensor: where the rows go; WriteTensor and AddGradient: the rows */
  uint64_t payload_size;
  const uint64_t* shape; /* WriteTensor and AddGradient: the shape of the array that has the payload */
  uint64_t dimensions;   /* the length of `shape`; 0: there is no shape */
  const char* head;      /* ReadTensor: the lossd.v1.HeadDescription that `payload` was made for, or NULL */
  uint64_t head_size;
  double timeout;    /* 0: the client's default */
  int32_t if_exists; /* CreateHead, if the head exists: 0: ALREADY_EXISTS, 1: it stays, 2: it is reset
                      * (IfExists in client.h) */
} lossd_request;

/* Begins a method and returns at once. `request`, and the memory that it points to, must not change until the
 * call has ended. */
void lossd_client_request(lossd_client* client, const lossd_request* request, lossd_call* call);

/* The answer is eight texts, each with its NUL: target and run of the client, and then how rows travel:
 * transport and its reason, connections and their reason, transport of rows on GPUs and its reason. Also
 * works for a client that is closed. */
void lossd_client_describe(lossd_client* client, lossd_call* call);
/* As Client::OpenMemory; a negative `device` means the first GPU of the server that this process sees.
 * Returns at once. The answer is empty if rows of the GPU do not go through memory of a GPU of the server. */
void lossd_client_open_memory(lossd_client* client, int32_t device, lossd_call* call);
/* As MonitoringCalls::KnownHiddenSize; 0 if it is not known. */
uint64_t lossd_client_known_hidden_size(lossd_client* client, const char* head);
/* As Client::AcknowledgeRestart. */
void lossd_client_acknowledge_restart(lossd_client* client, const char* head);

/* Returns the number of the GPU that the calling thread works on, and writes its UUID to `uuid`, which has
 * room for 64 characters. Negative if the thread works on no GPU, or there is no driver. */
int lossd_current_gpu(char* uuid);
/* Returns the number of the GPU that has the memory at the address, and writes its UUID to `uuid`. Negative
 * after an error, which the call has: UNAVAILABLE if there is no driver, INVALID_ARGUMENT if it is not memory
 * of a GPU. */
int lossd_gpu_of(const void* address, char* uuid, lossd_call* call);
/* Waits until all work is done that has been put so far on `stream`, a stream of the GPU that has the memory
 * at `address`. */
void lossd_await_stream(void* stream, const void* address, lossd_call* call);

/* ---- Loss computations ---- */

/* As Depth in client_options.h. */
typedef struct lossd_depth {
  uint64_t rows;
  const void* hidden;
  void* grad_hidden;
  double normalizer; /* only if has_normalizer */
  float weight;
  int32_t has_normalizer;
} lossd_depth;

/* A loss computation: Microbatch, LossOutputs and ComputeOptions of client_options.h in one struct. `open` is
 * a lossd.v1.OpenMicrobatch with head, step, microbatch_id, hidden_dtype, options, reduction, normalizer,
 * grad_output, accumulate_gradients, retain, class_count, top_k, target_count and embedding; its other fields
 * do not matter. N is `rows`.
 *
 * If `backward` is 1, the struct has the place of RetainedGradients and BackwardOptions. Then `open` is a
 * lossd.v1.OpenBackward with head, step, microbatch_id and accumulate_gradients. Of the other members only
 * rows, hidden_size, hidden_dtype, grad_hidden, grad_loss, grad_lse, grad_entropy, stream, timeout, streams,
 * on_device and has_stream matter. */
typedef struct lossd_loss {
  const char* open;
  uint64_t open_size;
  uint64_t rows;
  uint64_t hidden_size;
  const void* hidden;
  void* grad_hidden;
  const void* teacher_hidden;
  uint64_t teacher_hidden_size;
  const int32_t* targets;
  const float* row_weights;
  const float* advantages;
  const float* old_logprobs;
  const float* ref_logprobs;
  const int32_t* classes;
  uint64_t classes_size; /* entries of `classes` */
  const int32_t* target_classes;
  const float* target_weights;
  const lossd_depth* depths;
  uint64_t depth_count;
  float* row_loss;
  float* row_lse;
  float* row_entropy;
  float* row_logprob;
  int32_t* row_argmax;
  float* class_logprobs;
  float* top_logprobs;
  int32_t* top_classes;
  const float* grad_loss;
  const float* grad_lse;
  const float* grad_entropy;
  uint64_t slice_bytes; /* 0: the default of the transport */
  void* stream;         /* only if has_stream */
  double timeout;       /* 0: the client's default */
  int32_t streams;      /* 0: the client chooses */
  int32_t on_device;    /* 1: the rows are in GPU memory */
  int32_t has_stream;
  int32_t backward;     /* 1: the struct describes a backward */
  int32_t hidden_dtype; /* lossd.v1.DType; only for a backward */
} lossd_loss;

/* Checks the options of a loss: a serialized lossd.v1.LossOptions. The call ends with INVALID_ARGUMENT, which
 * names the field of the message, if no server of this version would take them. Does not check what depends
 * on the head. */
void lossd_check_options(const void* options, uint64_t size, lossd_call* call);
/* Limits the loss computations under way: the call takes one of the client's `most` places, and waits for a
 * place for at most `seconds`. Returns 1 if the call has a place; it gives the place back when it ends.
 * Returns 0 if no place was free in time. Also returns 1 if the client is closed; the call then ends with
 * that error. */
int lossd_client_enter(lossd_client* client, lossd_call* call, uint32_t most, double seconds);
/* Checks a loss computation without the server. Returns 0, and the call has ended with INVALID_ARGUMENT, if
 * the client would refuse the computation. Else returns 1, and the call is unchanged. Reads the struct and
 * the arrays of targets and classes, but no rows. */
int lossd_check_loss(const lossd_loss* loss, lossd_call* call);
/* Starts a loss computation and returns at once; lossd_call_wait waits for its end. The memory that the
 * struct points to belongs to the caller. Rows and results must stay valid, and rows must not change, until
 * the call has ended; everything else is copied. The answer is a lossd.v1.MicrobatchSummary of all rows. */
void lossd_client_compute(lossd_client* client, const lossd_loss* loss, lossd_call* call);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* LOSSD_CLIENT_LIBRARY_LOSSD_CLIENT_H_ */
