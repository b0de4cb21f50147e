// Many kernel calls for one from outside: a decode step makes hundreds, and asking for each from Python takes longer
// than the small ones run.

#define _POSIX_C_SOURCE 200809L
#include <stdint.h>
#include <time.h>

typedef struct {  // `run` is one of the functions that the build generates, one for every kernel (library.py)
    void (*run)(const void *arguments);
    const void *arguments;
} recorded_call;

static int64_t nanoseconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

// `recorded` is an array of `count` recorded calls. `nanoseconds` [count] tells how long each took; or it is NULL.
void qarl_replay(const void *recorded, int64_t count, int64_t *nanoseconds) {
    const recorded_call *calls = recorded;
    for (int64_t i = 0; i < count; i++) {
        int64_t started = nanoseconds ? nanoseconds_now() : 0;
        calls[i].run(calls[i].arguments);
        if (nanoseconds) nanoseconds[i] = nanoseconds_now() - started;
    }
}
