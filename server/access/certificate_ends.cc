// SPDX-License-Identifier: Apache-2.0
#include "server/access/certificate_ends.h"

#include <openssl/sha.h>

#include <utility>

#include "server/access/tls_material.h"

namespace lossd::access {

absl::Time CertificateEnds::Find(absl::string_view pem) {
  std::string digest(SHA256_DIGEST_LENGTH, '\0');
  SHA256(reinterpret_cast<const unsigned char*>(pem.data()), pem.size(),
         reinterpret_cast<unsigned char*>(digest.data()));
  {
    absl::MutexLock lock(&mutex_);
    if (const auto found = ends_.find(digest); found != ends_.end()) return found->second;
  }
  const absl::Time end = FirstEnd(pem);
  absl::MutexLock lock(&mutex_);
  if (ends_.size() >= kMost) ends_.clear();
  ends_.emplace(std::move(digest), end);
  return end;
}

}  // namespace lossd::access
