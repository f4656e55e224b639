-- wrk script: events of a kind given as argument, over many sessions.
--   turn_end    1,000 sessions x 200 chunks, of which 10 change
--   turn_start  a 200-chunk session's
--   health
local kind, thread_count = nil, 0

function setup(thread)
  thread:set("id", thread_count)
  thread_count = thread_count + 1
end

local function hashes(session, turn)
  local list = {}
  for i = 1, 190 do list[i] = string.format('"%016x"', session * 1000003 + i) end
  for i = 191, 200 do list[i] = string.format('"%016x"', session * 1000003 + i + turn * 1009) end
  return table.concat(list, ",")
end

function init(args)
  kind = args[1]
  math.randomseed(id + 1)
  wrk.method = "POST"
  wrk.path = "/event"
  bodies = {}
  if kind == "turn_end" then
    for session = 1, 1000 do
      for turn = 0, 1 do
        bodies[session * 2 + turn] = string.format(
          '{"type":"turn_end","session_id":"s%d","kv_transfer_params":{"chunk_hashes":[%s]}}',
          session, hashes(session, turn))
      end
    end
  end
  count = 0
end

function request()
  if kind == "turn_end" then
    count = count + 1
    local session = math.random(1, 1000)
    return wrk.format(nil, nil, nil, bodies[session * 2 + count % 2])
  elseif kind == "turn_start" then
    return wrk.format(nil, nil, nil,
      string.format('{"type":"turn_start","session_id":"s%d"}', math.random(1, 1000)))
  end
  return wrk.format(nil, nil, nil, '{"type":"health"}')
end

function response(status, headers, body)
  if status ~= 200 then refused = (refused or 0) + 1 end
end

function done(summary, latency, requests)
  io.write(string.format('JSON {"seconds":%f,"requests":%d,"not_200":%d,"errors":%d,"p50_ms":%f,"p99_ms":%f}\n',
    summary.duration / 1e6, summary.requests, summary.errors.status,
    summary.errors.connect + summary.errors.read + summary.errors.write + summary.errors.timeout,
    latency:percentile(50) / 1000, latency:percentile(99) / 1000))
end
