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
 * default that is a Unix socket in a folder that only the user of the process can enter; there is no port.
 *
 * The library leaves the process as it is, and works on threads of its own. It sets no limits of memory,
 * reads no flags, never ends the process, and reads no variables of the environment but TMPDIR and those of
 * gRPC and CUDA's libraries. It handles one signal: a thread of the library interrupts itself with SIGURG,
 * and the library sets a handler where there is none. The process ignores SIGPIPE and SIGXFSZ, as Python
 * does; a process that does not may be ended by what is written to a closed connection or to a full disk.
 * Once loaded, the library stays until the process ends.
 *
 * All functions are thread-safe, but no other function of a server runs when lossd_stop is called, nor later.
 * In a child that a process has forked a server is not there: the child calls no function with the parent's
 * server but lossd_address and lossd_http_address. A process stops its servers before it ends.
 *
 * The library brings the messages of the protocol, and one libprotobuf takes them once. So a C++ program that
 * has them already, with the client in client/cpp, does not load the library: it links app::Server, which is
 * the same (server.h).
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
  LOSSD_DEVICE_LOST =
      2 /* the device or another rank is lost, and with it what the heads had since the last save */
};

/* Of the library, for example "0.1.0". */
const char* lossd_version(void);

/* Starts a server and returns once it serves. `options` ends with NULL; each is "name=text" with the name of
 * a flag of the program (`lossd --help`) and the text that the flag would be given. Three defaults differ
 * from those of the program: listen is a Unix socket in a folder of its own below $TMPDIR, or /tmp; http is
 * empty, so there is no status page and there are no metrics; and log_level, which counts for all servers of
 * the process, is "warning".
 *
 * Several processes become one server with the options rank, ranks and leader, "127.0.0.1:7072" for example
 * (docs/scaling.md). Rank 0 serves; the others compute for rank 0, and their address is "". lossd_start
 * returns once all ranks have come together, or fails after rank_timeout. The ranks end together: what ends
 * one of them ends all.
 *
 * Returns NULL if the server cannot start, and sets `*code` to a status code of gRPC (3 INVALID_ARGUMENT, 4
 * DEADLINE_EXCEEDED, 8 RESOURCE_EXHAUSTED, 14 UNAVAILABLE, ...) and `*error` to a text that names the option
 * and what is wrong with it, to be given to lossd_free. Both may be NULL. */
lossd_server* lossd_start(const char* const* options, int* code, char** error);

/* Where clients connect, for example "unix:/tmp/lossd-a1b2c3/grpc" or "127.0.0.1:7070". The text is the
 * server's. */
const char* lossd_address(const lossd_server* server);

/* Of the status page and of the metrics, for example "127.0.0.1:7071"; "" without HTTP. The text is the
 * server's. */
const char* lossd_http_address(const lossd_server* server);

/* Waits until the server does not serve any more, for at most `seconds`; negative: without an end.
 * lossd_drain ends the wait, and the thread that waits returns before another one calls lossd_stop. */
enum lossd_state lossd_wait(lossd_server* server, double seconds);

/* Whether the server is well, as /livez says: 1, or 0 and `*why`, to be given to lossd_free. `why` may be
 * NULL. */
int lossd_live(lossd_server* server, char** why);

/* Refuses new calls, lets open ones finish for at most `seconds`, cancels the rest, and stops listening. 1:
 * no call of the server had to be cancelled. A later call does nothing and returns 1. Where there are several
 * ranks, this ends all of them; a rank other than 0 asks rank 0 to drain, and waits for that for `seconds`,
 * drain_timeout and 10 seconds more at the most. A drain that takes a minute beyond that waits for a device
 * that hangs: the server is given up (0, LOSSD_DEVICE_LOST). */
int lossd_drain(lossd_server* server, double seconds);

/* Stops the server, which cancels open calls, and gives back all that it has. After LOSSD_DEVICE_LOST, memory
 * stays taken: giving it back could wait for ever. NULL: nothing is done. */
void lossd_stop(lossd_server* server);

/* Gives back a text that a function above has set. */
void lossd_free(char* text);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* LOSSD_SERVER_APP_LOSSD_H_ */
