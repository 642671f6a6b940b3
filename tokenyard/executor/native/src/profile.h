// Where the time of steps goes, by phase. Compiled with -DTY_PROFILE for benchmarks only: else timed() is the call alone.
#pragma once

#ifdef TY_PROFILE
#include <chrono>
#endif

namespace ty {

enum Phase { EMBED, PREPARE, NORM, ROUND, SHRINK, QKV, PLACE, ATTEND, RECUR, OUTPUT, GATE_UP, DOWN, EXPERTS, HEAD, PHASES };

#ifdef TY_PROFILE
inline double phase_seconds[PHASES];

template <class Call>
void timed(Phase phase, const Call &call) {
    const auto begin = std::chrono::steady_clock::now();
    call();
    phase_seconds[phase] += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}
#else
template <class Call>
inline void timed(Phase, const Call &call) {
    call();
}
#endif

}  // namespace ty
