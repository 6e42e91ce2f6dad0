// SPDX-License-Identifier: Apache-2.0
// Until when certificates are valid: those of a connection are looked at with every call, and read once.
//
// Thread-safe.
#ifndef LOSSD_SERVER_ACCESS_CERTIFICATE_ENDS_H_
#define LOSSD_SERVER_ACCESS_CERTIFICATE_ENDS_H_

#include <cstddef>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace lossd::access {

class CertificateEnds {
 public:
  // Of the certificates of a PEM text the first end; the infinite past if it holds none that can be read.
  absl::Time Find(absl::string_view pem) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  static constexpr size_t kMost = 4096;  // then the table begins anew

  absl::Mutex mutex_;
  absl::flat_hash_map<std::string, absl::Time> ends_ ABSL_GUARDED_BY(mutex_);  // by SHA-256 of the text
};

}  // namespace lossd::access

#endif  // LOSSD_SERVER_ACCESS_CERTIFICATE_ENDS_H_
