/* What every function of the core returns, and the checks around it. */
#ifndef MHA_STATUS_H
#define MHA_STATUS_H

/* Around the declarations of every public header: for C++, and seen from outside the library. */
#ifdef __cplusplus
#define MHA_LINKAGE_BEGIN extern "C" {
#define MHA_LINKAGE_END }
#else
#define MHA_LINKAGE_BEGIN
#define MHA_LINKAGE_END
#endif
#if defined(MHA_BUILDS_LIBRARY) && !defined(_WIN32) /* where a DLL names what is seen */
#define MHA_API_BEGIN MHA_LINKAGE_BEGIN _Pragma("GCC visibility push(default)")
#define MHA_API_END _Pragma("GCC visibility pop") MHA_LINKAGE_END
#else
#define MHA_API_BEGIN MHA_LINKAGE_BEGIN
#define MHA_API_END MHA_LINKAGE_END
#endif

MHA_API_BEGIN

typedef enum mha_status {
    MHA_OK = 0,
    MHA_OUT_OF_MEMORY,
    MHA_SIZE_OVERFLOW,
    MHA_CANCELLED,
    MHA_INVALID_ARGUMENT
} mha_status;

#define MHA_MUST_CHECK __attribute__((warn_unused_result))

/* Forwards a failure to the caller: for functions that own nothing yet. */
#define MHA_TRY(call)                                                                              \
    do {                                                                                           \
        mha_status try_status = (call);                                                            \
        if (try_status != MHA_OK) {                                                                \
            return try_status;                                                                     \
        }                                                                                          \
    } while (0)

/* A static sentence without a full stop; never NULL. */
const char *mha_status_message(mha_status status);

MHA_API_END

#endif
