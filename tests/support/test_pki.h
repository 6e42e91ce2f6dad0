// SPDX-License-Identifier: Apache-2.0
// Certificate authorities and certificates of a test's own, made with the openssl program. Thread-compatible.
#ifndef LOSSD_TESTS_SUPPORT_TEST_PKI_H_
#define LOSSD_TESTS_SUPPORT_TEST_PKI_H_

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "tests/support/temp_folder.h"

namespace lossd::test {

class TestPki {
 public:
  // Has the authority "ca" and the server's certificate "server", for localhost and 127.0.0.1.
  TestPki() {
    MakeAuthority("ca");
    Issue("server", "DNS:localhost,IP:127.0.0.1");
  }

  std::string File(absl::string_view name) const { return folder_.File(name); }
  std::string Certificate(absl::string_view name) const { return File(absl::StrCat(name, ".pem")); }
  std::string Key(absl::string_view name) const { return File(absl::StrCat(name, ".key")); }

  void MakeAuthority(const std::string& name, int days = kDays) {
    Request(name, absl::StrCat("-subj /CN=", name), days);
  }
  // `names` as openssl has alternative names: "DNS:trainer-1,URI:spiffe://a/b".
  void Issue(const std::string& name, const std::string& names, const std::string& authority = "ca") {
    Request(name,
            absl::StrCat("-CA ", Certificate(authority), " -CAkey ", Key(authority), " -subj /CN=", name,
                         " -addext subjectAltName=", names, " -addext basicConstraints=critical,CA:FALSE"));
  }

  // A file that only this user can read.
  std::string Secret(absl::string_view name, absl::string_view content) const {
    WriteWholeFile(File(name), content);
    std::filesystem::permissions(File(name),
                                 std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
    return File(name);
  }

 private:
  static constexpr int kDays = 2;

  void Request(const std::string& name, const std::string& options, int days = kDays) {
    const std::string command = absl::StrCat(
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days ", days, " ",
        options, " -keyout ", Key(name), " -out ", Certificate(name), " 2>", File("openssl.log"));
    EXPECT_EQ(std::system(command.c_str()), 0) << command << "\n" << ReadWholeFile(File("openssl.log"));
  }

  TempFolder folder_;
};

}  // namespace lossd::test

#endif  // LOSSD_TESTS_SUPPORT_TEST_PKI_H_
