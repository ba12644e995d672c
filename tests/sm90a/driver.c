/* As much of the CUDA driver as compiling for a Hopper GPU asks: there is one, and it has capability 9.0. */
static int fine(void) { return 0; }
int cuInit(unsigned flags) { return fine(); }
int cuDriverGetVersion(int *version) { *version = 13000; return fine(); }
int cuCtxGetCurrent(void **context) { *context = (void *)1; return fine(); }
int cuCtxGetDevice(int *device) { *device = 0; return fine(); }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return fine(); }
int cuDeviceGetCount(int *count) { *count = 1; return fine(); }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 75 ? 9 : 0; return fine(); } /* 75: major */
int cuGetErrorName(int error, const char **text) { *text = "no driver"; return fine(); }
int cuGetErrorString(int error, const char **text) { return cuGetErrorName(error, text); }
