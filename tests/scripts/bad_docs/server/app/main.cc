ABSL_FLAG(std::string, listen, "", "");
ABSL_FLAG(
    bool, forgotten, false, "");
