// SPDX-License-Identifier: Apache-2.0
// Listener: a server on a port of its own that sends the same bytes to every client, with or without TLS, and
// closes the connection.
//
// Thread-compatible.
#ifndef LOSSD_TESTS_CLIENT_CPP_LISTENER_H_
#define LOSSD_TESTS_CLIENT_CPP_LISTENER_H_

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <openssl/ssl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace lossd::client {

class Listener {
 public:
  // `words`: the bytes; nullopt: it sends nothing until the client closes the connection. `certificate`: the
  // paths of a certificate and of its key; empty: no TLS.
  explicit Listener(std::optional<std::string> words, std::pair<std::string, std::string> certificate = {})
      : words_(std::move(words)), listener_(socket(AF_INET, SOCK_STREAM, 0)) {
    if (!certificate.first.empty()) UseTls(certificate.first, certificate.second);
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(listen(listener_, 16), 0);
    socklen_t length = sizeof(address);
    getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &length);
    target_ = absl::StrCat("127.0.0.1:", ntohs(address.sin_port));
    thread_ = std::thread([this] { Run(); });
  }
  // Waits until all clients have closed their connections.
  ~Listener() {
    shutdown(listener_, SHUT_RDWR);
    thread_.join();
    close(listener_);
  }
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  const std::string& target() const { return target_; }

 private:
  void UseTls(const std::string& certificate, const std::string& key) {
    context_ = {SSL_CTX_new(TLS_server_method()), SSL_CTX_free};
    EXPECT_EQ(SSL_CTX_use_certificate_chain_file(context_.get(), certificate.c_str()), 1);
    EXPECT_EQ(SSL_CTX_use_PrivateKey_file(context_.get(), key.c_str(), SSL_FILETYPE_PEM), 1);
    SSL_CTX_set_alpn_select_cb(context_.get(), ChooseHttp2, nullptr);
  }
  static int ChooseHttp2(SSL*, const unsigned char** chosen, unsigned char* size, const unsigned char*,
                         unsigned, void*) {
    *chosen = reinterpret_cast<const unsigned char*>("h2");
    *size = 2;
    return SSL_TLSEXT_ERR_OK;
  }

  void Run() {
    std::vector<std::thread> answers;
    while (true) {
      const int connection = accept(listener_, nullptr, nullptr);
      if (connection < 0) break;
      answers.emplace_back([this, connection] {
        context_ == nullptr ? Speak(connection) : SpeakInSecret(connection);
        char heard[256];
        while (recv(connection, heard, sizeof(heard), 0) > 0) continue;
        close(connection);
      });
    }
    for (std::thread& answer : answers) answer.join();
  }
  void Speak(int connection) const {
    if (!words_.has_value()) return;
    send(connection, words_->data(), words_->size(), MSG_NOSIGNAL);
    shutdown(connection, SHUT_WR);
  }
  void SpeakInSecret(int connection) const {
    const std::unique_ptr<SSL, void (*)(SSL*)> ssl(SSL_new(context_.get()), SSL_free);
    SSL_set_fd(ssl.get(), connection);
    if (SSL_accept(ssl.get()) == 1 && words_.has_value()) {
      if (!words_->empty()) SSL_write(ssl.get(), words_->data(), static_cast<int>(words_->size()));
      SSL_shutdown(ssl.get());
    }
    if (words_.has_value() || SSL_is_init_finished(ssl.get()) == 0) shutdown(connection, SHUT_WR);
  }

  const std::optional<std::string> words_;
  const int listener_;
  std::unique_ptr<SSL_CTX, void (*)(SSL_CTX*)> context_ = {nullptr, SSL_CTX_free};
  std::string target_;
  std::thread thread_;
};

}  // namespace lossd::client

#endif  // LOSSD_TESTS_CLIENT_CPP_LISTENER_H_
