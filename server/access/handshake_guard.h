// SPDX-License-Identifier: Apache-2.0
// What gRPC 1.51 leaves open in its TLS handshakes and offers no option for, closed beneath it: OpenSSL calls
// a program back for each context and each connection that it makes, and there this sets what gRPC does not.
//
//  - A peer's certificate is refused, before gRPC looks at its names, if gRPC ends the process over one of
//  them: an address
//    that has neither 4 nor 16 bytes, a name that is no text.
//  - No session is resumed. A resumed one brings a certificate that was verified long ago.
//
// Thread-safe.
#ifndef LOSSD_SERVER_ACCESS_HANDSHAKE_GUARD_H_
#define LOSSD_SERVER_ACCESS_HANDSHAKE_GUARD_H_

#include <openssl/x509.h>

namespace lossd::access {

// For all contexts that are made from now on. Later calls do nothing.
void GuardHandshakes();

// Whether every name of the certificate is one that a program can take without a thought. For tests.
bool HasSoundNames(X509* certificate);

}  // namespace lossd::access

#endif  // LOSSD_SERVER_ACCESS_HANDSHAKE_GUARD_H_
