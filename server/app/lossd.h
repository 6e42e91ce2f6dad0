// SPDX-License-Identifier: Apache-2.0
/* The server as a library, liblossd.so: lossd_start starts a server in the calling process, and lossd_stop
 * ends it. A process may have several servers at once, and start and stop servers as often as it likes.
 *
 *   const char* const options[] = {"backend=cpu", "checkpoint_dir=/data/checkpoints", NULL};
 *   char* error = NULL;
 *   lossd_server* server = lossd_start(options, NULL, &error);
 *   if (server == NULL) { fprintf(stderr, "%s\n", error); lossd_free(error); return 1; }
 *   ... a client connects to lossd_address(server) ...
 *   lossd_stop(server);
 *
 * A server speaks the protocol of the program lossd, and a client of any language connects to its address. By
 * default the address is a Unix socket in a folder that only the user of the process can enter, and there is
 * no port.
 *
 * The library does not change settings of the process, and works on threads of its own. It sets no limits of
 * memory, reads no flags, never ends the process, and reads no environment variables except TMPDIR and those
 * of gRPC and CUDA's libraries. It uses one signal: threads of the library interrupt themselves with SIGURG,
 * and the library installs a handler if there is none. The process should ignore SIGPIPE and SIGXFSZ, as
 * Python does. Otherwise a write to a closed connection, or beyond the limit of file sizes, may end the
 * process. Once loaded, the library stays until the process ends.
 *
 * All functions are thread-safe, with one exception: no other function of a server may run when lossd_stop is
 * called, nor later. A forked child has no server: with the parent's server it may call only lossd_address
 * and lossd_http_address. A process must stop its servers before it ends.
 *
 * The library contains the messages of the protocol, and a libprotobuf accepts their definitions only once.
 * So a C++ program that already has these messages, because it uses the client in client/cpp, must not load
 * the library. It links app::Server (server.h) instead, which is the same server.
 */
#ifndef LOSSD_SERVER_APP_LOSSD_H_
#define LOSSD_SERVER_APP_LOSSD_H_

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lossd_server lossd_server;

enum lossd_state {
  LOSSD_SERVES = 0,
  LOSSD_DRAINED = 1, /* lossd_drain was called, or another rank has ended the server */
  /* The device or another rank is lost, and with it all changes of the heads since the last save. */
  LOSSD_DEVICE_LOST = 2
};

/* The version of the library, for example "0.1.0". */
const char* lossd_version(void);

/* Starts a server and returns once it serves. `options` ends with NULL; each is "name=text" with the name of
 * a flag of the program (`lossd --help`) and the flag's text. Three defaults differ from the program's:
 * listen is a Unix socket in a new folder below $TMPDIR or /tmp; http is empty, so there is no status page
 * and there are no metrics; and log_level, which applies to all servers of the process, is "warning".
 *
 * Several processes become one server with the options rank, ranks and leader, "127.0.0.1:7072" for example
 * (docs/scaling.md). Rank 0 serves clients. The other ranks compute for rank 0, and their address is "".
 * lossd_start returns once all ranks are connected, or fails after rank_timeout. The ranks end together: when
 * one of them ends, all end.
 *
 * Returns NULL if the server cannot start, and sets `*code` to a status code of gRPC (3 INVALID_ARGUMENT, 4
 * DEADLINE_EXCEEDED, 8 RESOURCE_EXHAUSTED, 14 UNAVAILABLE, ...) and `*error` to a text that names the option
 * and what is wrong with it. Free the text with lossd_free. Both pointers may be NULL. */
lossd_server* lossd_start(const char* const* options, int* code, char** error);

/* The address at which clients connect, for example "unix:/tmp/lossd-a1b2c3/grpc" or "127.0.0.1:7070". The
 * text belongs to the server. */
const char* lossd_address(const lossd_server* server);

/* The address of the status page and the metrics, for example "127.0.0.1:7071"; "" without HTTP. The text
 * belongs to the server. */
const char* lossd_http_address(const lossd_server* server);

/* Waits until the server does not serve any more, for at most `seconds`; negative: without a limit.
 * lossd_drain ends the wait. The call must have returned before another thread calls lossd_stop. */
enum lossd_state lossd_wait(lossd_server* server, double seconds);

/* Returns 1 if the server is live (as /livez reports it). Otherwise returns 0 and sets `*why` to the reason.
 * Free the reason with lossd_free. `why` may be NULL. */
int lossd_live(lossd_server* server, char** why);

/* Refuses new calls, lets open calls finish for at most `seconds`, cancels the remaining ones, and stops
 * listening. Returns 1 if no call of the server had to be cancelled. A later call does nothing and returns 1.
 *
 * If there are several ranks, this ends all of them. A rank other than 0 asks rank 0 to drain, and waits for
 * at most `seconds` + drain_timeout + 10 seconds. If a drain takes a minute longer than that, a device hangs,
 * and the server is given up: the result is 0, and the state LOSSD_DEVICE_LOST. */
int lossd_drain(lossd_server* server, double seconds);

/* Stops the server, which cancels open calls, and frees all its resources. After LOSSD_DEVICE_LOST it does
 * not free memory, because that could wait forever. Does nothing if `server` is NULL. */
void lossd_stop(lossd_server* server);

/* Frees a text that a function above has set. */
void lossd_free(char* text);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* LOSSD_SERVER_APP_LOSSD_H_ */
