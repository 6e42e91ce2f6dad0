const char* kNames[] = {"lossd_heads", "lossd_forgotten"};
