-- wrk script: sends events from a file, one after the other, from a random one on.
-- Arguments: the file, with the beginning of an event on each line; events in a request (0: one
-- that is no array); fresh hashes that end an event (0: the line is whole); 32-bit words in a
-- hash; seed of the fresh ones; percentiles to report, with commas between them; connections.
--
-- The rate is taken from the answer on with which each connection could have had one, to the last
-- answer. Servers that work on all connections at once answer them in waves: over the whole time,
-- a wave that was cut off at the end would count as no work at all, more so the slower the server.
local ffi = require("ffi")
ffi.cdef[[
  typedef struct { long seconds; long nanoseconds; } bench_time;
  int clock_gettime(int clock, bench_time *now);
]]
local MONOTONIC = 1
local thread_of_all

local function now()
  local time = ffi.new("bench_time")
  ffi.C.clock_gettime(MONOTONIC, time)
  return tonumber(time.seconds) + tonumber(time.nanoseconds) / 1e9
end

function setup(thread)
  thread_of_all = thread
end

function init(args)
  beginnings = {}
  for line in io.lines(args[1]) do beginnings[#beginnings + 1] = line end
  in_array, fresh = tonumber(args[2]), tonumber(args[3])
  words = tonumber(args[4])
  math.randomseed(tonumber(args[5]))
  position = math.random(#beginnings)  -- else each run would meet the same sessions
  percentiles = args[6]
  hash_format = '"' .. string.rep("%08x", words) .. '"'
  wrk.method = "POST"
  wrk.headers["Content-Type"] = "application/json"
  not_200, refused, first_refusal = 0, 0, ""
  connections, answers, steady_from, steady_to = tonumber(args[7]), 0, 0, 0
end

local function fresh_hash()
  local random = {}
  for word = 1, words do random[word] = math.random(0, 4294967295) end
  return string.format(hash_format, unpack(random))
end

local function event()
  position = position % #beginnings + 1
  if fresh == 0 then return beginnings[position] end
  local hashes = {}
  for number = 1, fresh do hashes[number] = fresh_hash() end
  return beginnings[position] .. table.concat(hashes, ",") .. "]}}"
end

function request()
  if in_array == 0 then return wrk.format(nil, nil, nil, event()) end
  local events = {}
  for number = 1, in_array do events[number] = event() end
  return wrk.format(nil, nil, nil, "[" .. table.concat(events, ",") .. "]")
end

function response(status, headers, body)
  answers, steady_to = answers + 1, now()
  if answers == connections then steady_from = steady_to end
  if status ~= 200 then
    not_200 = not_200 + 1
  elseif body:find('"ok":false', 1, true) or not body:find('"ok":true', 1, true) then
    refused = refused + 1
  else
    return
  end
  if first_refusal == "" then first_refusal = status .. " " .. body:sub(1, 200) end
end

function done(summary, latency, requests)
  local curve = {}
  for percentile in thread_of_all:get("percentiles"):gmatch("[^,]+") do
    curve[#curve + 1] = string.format("%.4f", latency:percentile(tonumber(percentile)) / 1000)
  end
  local errors = summary.errors
  io.write(string.format("BENCH requests %d seconds %f not_200 %d refused %d broken %d\n",
    summary.requests, summary.duration / 1e6, thread_of_all:get("not_200"),
    thread_of_all:get("refused"), errors.connect + errors.read + errors.write + errors.timeout))
  local get = function(name) return thread_of_all:get(name) end
  io.write(string.format("STEADY requests %d seconds %f\n",
    math.max(get("answers") - get("connections"), 0), get("steady_to") - get("steady_from")))
  io.write("CURVE " .. table.concat(curve, " ") .. "\n")
  io.write("REFUSAL " .. thread_of_all:get("first_refusal"):gsub("%s+", " ") .. "\n")
end
