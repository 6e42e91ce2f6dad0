// SPDX-License-Identifier: Apache-2.0
// On(): tells which of the small changes ("mutants") that mutate.py has made in the code is active. It is the
// mutant with the number in LOSSD_MUTANT, or none. Not part of lossd.
//
// A changed place reads `On(7) ? changed : original`, so all mutants are compiled at once. If
// LOSSD_MUTANT_REACHED names a file, byte n of it becomes 1 when place n is reached in any process with this
// variable.
#ifndef LOSSD_TESTS_MUTANTS_MUTANT_H_
#define LOSSD_TESTS_MUTANTS_MUTANT_H_

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>

namespace lossd_mutants {

struct Control {
  int active = 0;
  volatile char* reached = nullptr;
  long size = 0;
  Control() {
    if (const char* text = std::getenv("LOSSD_MUTANT")) active = std::atoi(text);
    const char* path = std::getenv("LOSSD_MUTANT_REACHED");
    const int file = path ? open(path, O_RDWR) : -1;
    struct stat facts;
    if (file < 0 || fstat(file, &facts) != 0) return;
    void* memory =
        mmap(nullptr, static_cast<size_t>(facts.st_size), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (memory == MAP_FAILED) return;
    reached = static_cast<volatile char*>(memory);
    size = facts.st_size;
  }
};

inline bool On(int number) {
  static Control* const control = new Control;  // never destroyed, so it outlives every thread
  if (control->reached != nullptr && number < control->size) control->reached[number] = 1;
  return control->active == number;
}

}  // namespace lossd_mutants

#endif  // LOSSD_TESTS_MUTANTS_MUTANT_H_
