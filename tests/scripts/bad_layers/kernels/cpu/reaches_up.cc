#include "server/head/head.h"
