#include "mha/status.h"

const char *mha_status_message(mha_status status) {
    switch (status) {
    case MHA_OK:
        return "ok";
    case MHA_OUT_OF_MEMORY:
        return "out of memory";
    case MHA_SIZE_OVERFLOW:
        return "a size overflows";
    case MHA_CANCELLED:
        return "cancelled";
    case MHA_INVALID_ARGUMENT:
        return "invalid argument";
    }
    return "unknown status";
}
