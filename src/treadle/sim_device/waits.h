// Waits of the host that its caller did not ask for by name.
#pragma once

#include <map>
#include <string>

namespace sim {

std::map<std::string, int> take_implicit_waits();  // by operator, since the last call
bool forbid_implicit_waits(bool forbid);           // an implicit wait raises; returns what held before

}  // namespace sim
