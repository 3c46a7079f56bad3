// The main function of every test executable: the registered cases are those of the files that it is linked from.
#include "support/check.h"

int main(int argc, char** argv) { return check::run_main(argc, argv); }
