/* Opens the plugin from plain C, as NCCL does, and checks that each table is there. Prints one line per table. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

int main(int argc, char** argv) {
  if (argc != 2) {
    fprintf(stderr, "usage: %s <path of libnccl-net.so>\n", argv[0]);
    return 2;
  }
  void* library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  for (int version = 5; version <= 12; ++version) {
    char symbol[32];
    snprintf(symbol, sizeof symbol, "ncclNetPlugin_v%d", version);
    /* Every table begins with the plugin's name. */
    const char* const* table = (const char* const*)dlsym(library, symbol);
    if (table == NULL) {
      fprintf(stderr, "%s: %s is missing: %s\n", argv[1], symbol, dlerror());
      return 1;
    }
    if (*table == NULL || strcmp(*table, "BaguaNet") != 0) {
      fprintf(stderr, "%s: %s is named %s, not BaguaNet\n", argv[1], symbol, *table == NULL ? "(NULL)" : *table);
      return 1;
    }
    printf("%s %s\n", symbol, *table);
  }
  if (dlclose(library) != 0) {
    fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  return 0;
}
