// pycomm._native: the board, and the clock that it is written by.
#include <pybind11/pybind11.h>

#include <cstddef>

#include "../shm/board.h"
#include "gil.h"
#include "shm_call.h"

namespace py = pybind11;

namespace pycomm {
namespace {

using shm::Board;
using shm::BoardHeader;
using shm::BoardLayout;
using shm::Log;
using NoGil = py::call_guard<WithoutGil>;

// Where a reader finds what, so that Python repeats no number of board.h.
py::dict layout() {
  py::dict at;
  at["magic"] = shm::kBoardMagic;
  at["total"] = BoardLayout::total;
  at["names"] = BoardLayout::names;
  at["name_bytes"] = shm::kNameBytes;
  at["groups"] = BoardLayout::groups;
  at["group_count"] = shm::kBoardGroups;
  at["group_bytes"] = sizeof(shm::GroupEntry);
  at["records"] = BoardLayout::records;
  at["record_count"] = shm::kRecords;
  at["record_bytes"] = sizeof(shm::Record);
  at["record_number"] = offsetof(BoardHeader, records);
  at["classes"] = BoardLayout::classes;
  at["class_count"] = shm::kClasses;
  at["class_bytes"] = sizeof(shm::CallClass);
  at["buckets"] = shm::kBuckets;
  at["verdict"] = offsetof(BoardHeader, verdict);
  at["answer"] = offsetof(BoardHeader, answer);
  at["text_bytes"] = shm::kTextBytes;
  return at;
}

}  // namespace

void bind_board(py::module_& m);  // module.cpp

void bind_board(py::module_& m) {
  py::class_<Log, std::shared_ptr<Log>>(m, "BoardLog", "What a group writes its calls with.")
      .def("begin",
           [](Log& log, int verb, int op, int dtype, int algorithm, bool is_plan, int root, std::uint64_t numel, std::uint64_t bytes, std::uint64_t seq) {
             const auto code = [](int value) { return static_cast<std::uint8_t>(value); };
             return log.begin({code(verb), code(op), code(dtype), code(is_plan ? shm::kIsPlan : 0), code(algorithm), root, numel, bytes}, seq, log.ticks());
           })
      .def("end", [](Log& log, std::uint64_t wire_bytes, bool has_failed) {
             if (has_failed) log.fail();
             log.end(wire_bytes);
           })
      .def("waits_for", &Log::waits_for, py::arg("peer"))
      .def("close", &Log::close);
  py::class_<Board, std::shared_ptr<Board>>(m, "Board", "What this process calls, readable from outside.")
      .def(py::init<>())
      .def_property_readonly("fd", &Board::fd)
      .def("set_job", &Board::set_job, py::arg("job"), py::arg("rank"), py::arg("world_size"))
      .def("add_group", &Board::add_group, py::arg("name"), py::arg("transport"), py::arg("members"), py::arg("rank"), py::arg("world_size"))
      .def("intern", &Board::intern, py::arg("algorithm"))
      .def("set_verdict", &Board::set_verdict, py::arg("text"))
      .def("await_question", [](Board& board, double timeout_s) { return board.await_question(nanoseconds(timeout_s)); }, py::arg("timeout_s"), NoGil())
      .def("answer", &Board::answer, py::arg("text"));
  m.def("board_layout", layout, "Where a board has what, in bytes.");
  m.def("board_ticks", [](bool has_tsc) { return Board::ticks(has_tsc); }, py::arg("has_tsc"), "Now, in the ticks of a board.");
  m.def("ask_board", [](int fd, double timeout_s) { return shm::ask_board(fd, nanoseconds(timeout_s)); }, py::arg("fd"), py::arg("timeout_s"), NoGil(),
        "Asks the process of a board where it stands; False if it does not answer.");
}

}  // namespace pycomm
