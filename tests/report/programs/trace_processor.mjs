// Perfetto's trace processor as a server that the Python package `perfetto` speaks to.
//
//   node trace_processor.mjs FOLDER      # with engine_bundle.js and trace_processor.wasm, as Perfetto's page has them
//
// Prints the port on which it listens, on loopback, and ends when its standard input does. The page sends its engine messages of
// the type TraceProcessorRpc; the package sends a request's arguments alone, to an address for each kind of request.
import { readFileSync } from "node:fs";
import { createServer } from "node:http";
import path from "node:path";

const folder = process.argv[2];
/** By address: the number of the method, of the field with its arguments, and of the field with its result. */
const METHODS = { "/parse": [1, 101, 201], "/notify_eof": [2, null, 212], "/query": [3, 103, 203], "/status": [10, null, 210] };

const RESET = 11; // TPM_RESET_TRACE_PROCESSOR

const engine = startEngine();
let isComplete = false; // a trace has been read to its end: what comes next is another one
const server = createServer((request, response) => {
  const body = [];
  request.on("data", (chunk) => body.push(chunk));
  request.on("end", () => {
    const [method, argument, result] = METHODS[request.url] ?? [];
    if (method === undefined) return response.writeHead(404).end();
    if (request.url === "/parse" && isComplete) engine(call(RESET));
    if (request.url === "/parse" || request.url === "/notify_eof") isComplete = request.url === "/notify_eof";
    const answer = engine(call(method, argument === null ? [] : [field(argument, Buffer.concat(body))]));
    // Large results come in several messages; in protobuf, messages one after the other are one with the fields of all.
    return response.end(Buffer.concat(answer.flatMap((each) => fieldsOf(each, result))));
  });
});
server.listen(0, "127.0.0.1", () => console.log(server.address().port));
process.stdin.resume().on("end", () => process.exit());

/** Start the engine; return a function that sends it a message, and returns the messages of its answer. */
function startEngine() {
  const received = [];
  const port = { postMessage: (bytes) => received.push(Buffer.from(bytes)) };
  // The engine refuses to run in node, and wants to be the worker of a page: it is shown no process, and what it needs of a worker.
  const worker = { location: { href: "" } };
  class XMLHttpRequest {
    open(_, name) {
      this.name = name;
    }
    send() {
      const bytes = readFileSync(path.join(folder, this.name));
      this.response = bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length);
    }
  }
  const source = readFileSync(path.join(folder, "engine_bundle.js"), "utf8");
  new Function("process", "self", "WorkerGlobalScope", "XMLHttpRequest", "console", source)(
    undefined, worker, class {}, XMLHttpRequest, { log() {}, warn: console.error, error: console.error },
  );
  worker.onmessage({ data: port });
  return (bytes) => {
    received.length = 0;
    port.onmessage({ data: new Uint8Array(bytes) });
    return fieldsOf(Buffer.concat(received), 1);
  };
}

/** Return the values of a field of a message of protobuf whose fields are bytes or whole numbers. */
function fieldsOf(message, number) {
  const found = [];
  let at = 0;
  const next = () => {
    let value = 0;
    for (let weight = 1; ; weight *= 128) {
      const byte = message[at++];
      value += (byte & 127) * weight;
      if (byte < 128) return value;
    }
  };
  while (at < message.length) {
    const tag = next();
    const value = next(); // the number itself, or the length of the bytes that follow
    if (tag % 8 !== 2) continue;
    if (tag >> 3 === number) found.push(message.subarray(at, at + value));
    at += value;
  }
  return found;
}

/** Return a request of a method, with the fields of its arguments. */
function call(method, fields = []) {
  return field(1, Buffer.concat([varint((2 << 3) | 0), varint(method), ...fields]));
}

function field(number, bytes) {
  return Buffer.concat([varint((number << 3) | 2), varint(bytes.length), bytes]);
}

function varint(value) {
  const bytes = [];
  for (; value > 127; value = Math.floor(value / 128)) bytes.push((value % 128) | 128);
  return Buffer.from([...bytes, value]);
}
