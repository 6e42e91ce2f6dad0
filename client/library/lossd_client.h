// SPDX-License-Identifier: Apache-2.0
/* The client as a library, in liblossd.so beside the server (server/app/lossd.h): what the C++ client does
 * (client/cpp/client.h), for languages that load a library. The Python package is made on it.
 *
 *   lossd_call* call = lossd_call_new(0);
 *   const char* const options[] = {"target=127.0.0.1:7070", NULL};
 *   lossd_client* client = lossd_client_new();
 *   lossd_client_connect(client, options, call);
 *   lossd_call_wait(call, -1);
 *   lossd_call_result(call, &result);
 *   if (result.code != 0) { fprintf(stderr, "%s\n", result.message); ... }
 *
 * A `lossd_call` is what a function that takes one has become: its status, its answer, and the way to end it
 * early. It serves one function, but lossd_client_enter, lossd_check_loss and lossd_client_compute of one
 * loss computation share it. Requests and answers are messages of the protocol (proto/lossd/v1), serialized.
 * Times are seconds, sizes are bytes; rows are as client_options.h has them.
 *
 * Status codes are gRPC's: 0 OK, 3 INVALID_ARGUMENT and so on; message, detail and repeats are those of the
 * C++ client. Errors name options and arguments as the Python client does: "channels", "targets".
 *
 * All functions are thread-safe. Only lossd_call_free and lossd_client_free are the last to be called with
 * their object, and a call that names a client is freed before it. In a child that a process has forked a
 * client is not there: the child calls nothing with it. */
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

/* `blocks`: a function that begins something and returns at once does it before it returns, on the calling
 * thread. Loss computations are begun all the same. */
lossd_call* lossd_call_new(int blocks);
/* Ends the call early, with CANCELLED; no effect once it has ended. A call whose function has not begun ends
 * at once, and the function does nothing. */
void lossd_call_cancel(lossd_call* call);
/* Waits until the call has ended, for at most `seconds`; negative: without an end. 1 if it has. */
int lossd_call_wait(lossd_call* call, double seconds);
/* What a call that has ended has become. Texts and bytes are the call's. */
typedef struct lossd_result {
  int32_t code;        /* its status */
  int32_t reason;      /* of an ABORTED: 1: the server was restarted; 2: gradients were discarded; else 0 */
  const char* message; /* of an error */
  const void* detail;  /* lossd.v1.ErrorDetail of an error; NULL if it has none */
  uint64_t detail_size;
  const void* answer; /* with OK */
  uint64_t answer_size;
  /* Of a loss computation with OK: its loss, and what it cost. */
  double loss;
  double wall_seconds;
  uint64_t sent_bytes;
  uint64_t received_bytes;
  int32_t streams;
  int32_t repeats;
} lossd_result;

void lossd_call_result(const lossd_call* call, lossd_result* result);
/* lossd.v1.SaveProgress: the newest that SaveCheckpoint has told since the last time; NULL: nothing new. The
 * bytes are valid until the next of these calls. */
const void* lossd_call_progress(lossd_call* call, size_t* size);
/* Ends it, waits for that, and frees it. */
void lossd_call_free(lossd_call* call);

/* ---- Clients ---- */

/* What is said of a client: texts "name=value", and NULL. Names and meaning are those of ClientOptions,
 * CredentialOptions and RetryOptions (client_options.h), with times in seconds: target, ca, cert, key, token,
 * transport, run, channels, connect_timeout, wait_for_server, max_message_bytes, call_timeout,
 * transfer_timeout, loss_timeout, dead_peer_timeout, max_attempts, initial_backoff, max_backoff,
 * shared_memory_bytes and expected_incarnation; besides, context: the name of a server in the file of named
 * servers (client/cpp/contexts.h). What is not said of the server is said by the environment and by the named
 * server, other options have their defaults. INVALID_ARGUMENT names an option that is wrong or unknown.
 *
 * lossd_client_complete has the server that options mean as its answer, in seven texts, each with its NUL:
 * target, ca, cert, key, token, transport and run. */
void lossd_client_complete(const char* const* options, lossd_call* call);

lossd_client* lossd_client_new(void);
/* Begins to connect a new client, once, and returns at once; the call ends when it is connected, or says why
 * it is not: also where the server does not know this client, or gives it no role. With the transport
 * "cuda_ipc" the client opens memory of the GPU that the calling thread works on. */
void lossd_client_connect(lossd_client* client, const char* const* options, lossd_call* call);
/* Ends the calls under way, waits for them, and lets go of the connections. Later calls end with CANCELLED.
 * The call ends then; NULL: the function returns then. */
void lossd_client_close(lossd_client* client, lossd_call* call);
/* Closes the client and frees it. */
void lossd_client_free(lossd_client* client);

/* One method of the services. Members that a method does not need are 0. */
typedef struct lossd_request {
  const char* method;  /* "CreateHead", "DescribeHead", "ApplyStep", ... */
  const char* message; /* serialized; of WriteTensor and AddGradient an OpenTensor and an OpenGradient */
  uint64_t message_size;
  void* payload; /* of ReadTensor: where the rows go; of WriteTensor and AddGradient: the rows */
  uint64_t payload_size;
  const uint64_t* shape; /* of WriteTensor and AddGradient: of the array that the payload is */
  uint64_t dimensions;   /* of `shape`; 0: there is none */
  const char* head;      /* of ReadTensor: lossd.v1.HeadDescription that `payload` was made for, or NULL */
  uint64_t head_size;
  double timeout;    /* 0: the client's own */
  int32_t if_exists; /* of CreateHead, what becomes of a head of that name: 0: ALREADY_EXISTS, 1: it stays, 2:
                      * it is reset (IfExists in client.h) */
} lossd_request;

/* Begins a method, and returns at once. What `request` points to, and itself, stay as they are until the call
 * has ended. */
void lossd_client_request(lossd_client* client, const lossd_request* request, lossd_call* call);

/* Eight texts, each with its NUL, as the answer: target and run of the client, and how rows travel: transport
 * and reason, connections and reason, transport of rows on GPUs and reason. Of a client that is closed, too.
 */
void lossd_client_describe(lossd_client* client, lossd_call* call);
/* As Client::OpenMemory; a negative number is the first GPU that is the server's. Returns at once; the answer
 * is empty if rows of the GPU do not go through memory of a GPU of the server. */
void lossd_client_open_memory(lossd_client* client, int32_t device, lossd_call* call);
/* As MonitoringCalls::KnownHiddenSize; 0: it is not known. */
uint64_t lossd_client_known_hidden_size(lossd_client* client, const char* head);
/* As Client::AcknowledgeRestart. */
void lossd_client_acknowledge_restart(lossd_client* client, const char* head);

/* The number of the GPU that the calling thread works on, and its UUID, which has room for 64 characters;
 * negative: it works on none, or there is no driver. */
int lossd_current_gpu(char* uuid);
/* The number of the GPU whose memory is at the address, and its UUID; negative, and the call says why:
 * UNAVAILABLE if there is no driver, INVALID_ARGUMENT if it is not memory of a GPU. */
int lossd_gpu_of(const void* address, char* uuid, lossd_call* call);
/* Waits for all that a stream of the GPU whose memory is at the address has been given so far. */
void lossd_await_stream(void* stream, const void* address, lossd_call* call);

/* ---- Loss computations ---- */

/* As Depth (client_options.h). */
typedef struct lossd_depth {
  uint64_t rows;
  const void* hidden;
  void* grad_hidden;
  double normalizer; /* only if has_normalizer */
  float weight;
  int32_t has_normalizer;
} lossd_depth;

/* As Microbatch, LossOutputs and ComputeOptions (client_options.h). `open` is a lossd.v1.OpenMicrobatch with
 * head, step, microbatch_id, hidden_dtype, options, reduction, normalizer, grad_output, accumulate_gradients,
 * retain, class_count, top_k, target_count and embedding; its other fields do not matter. N is `rows`.
 *
 * With `backward` as RetainedGradients and BackwardOptions: `open` is a lossd.v1.OpenBackward with head,
 * step, microbatch_id and accumulate_gradients, and of the rest rows, hidden_size, hidden_dtype, grad_hidden,
 * grad_loss, grad_lse, grad_entropy, stream, timeout, streams, on_device and has_stream matter. */
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
  uint64_t slice_bytes; /* 0: what suits the way they travel */
  void* stream;         /* only if has_stream */
  double timeout;       /* 0: the client's own */
  int32_t streams;      /* 0: as many as suit */
  int32_t on_device;    /* the rows are in memory of a GPU */
  int32_t has_stream;
  int32_t backward;
  int32_t hidden_dtype; /* lossd.v1.DType, of a backward */
} lossd_loss;

/* Ends with INVALID_ARGUMENT, which names the field as the message does, if no server of this version takes
 * the options of a loss, a serialized lossd.v1.LossOptions. What depends on the head is not looked at. */
void lossd_check_options(const void* options, uint64_t size, lossd_call* call);
/* Takes one of the client's `most` places for loss computations under way, and waits for one for at most
 * `seconds`. 1 if the call has one, which it gives back when it ends; 0 if there was none in time. 1 also for
 * a client that is closed: the call will say so. */
int lossd_client_enter(lossd_client* client, lossd_call* call, uint32_t most, double seconds);
/* What a loss computation is refused for without the server being asked: then 0, and the call has ended with
 * INVALID_ARGUMENT; else 1, and nothing has become of the call. Reads the struct alone and what it says of
 * targets and classes, no rows. */
int lossd_check_loss(const lossd_loss* loss, lossd_call* call);
/* Starts a loss computation and returns at once; lossd_call_wait waits for its end. Memory that the struct
 * points to is the caller's: rows and results stay as they are until the call has ended; everything else is
 * copied. The answer is a lossd.v1.MicrobatchSummary of all rows. */
void lossd_client_compute(lossd_client* client, const lossd_loss* loss, lossd_call* call);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* LOSSD_CLIENT_LIBRARY_LOSSD_CLIENT_H_ */
