{{- /* What an engine's pod is: (dict "root" $ "role" "" "serves" true "store" false), role "", "prefill" or "decode". */ -}}
{{- define "tokenyard.enginePod" -}}
{{- $root := .root -}}
{{- $engine := $root.Values.engine -}}
enableServiceLinks: false
# The pre-stop pause, --shutdown-timeout and a little more.
terminationGracePeriodSeconds: {{ add $engine.shutdownTimeoutS 30 }}
securityContext: {runAsNonRoot: true, runAsUser: 10001, fsGroup: 10001}
{{- with $engine.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $engine.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
containers:
  - name: engine
    image: {{ $engine.image }}
    args:
      - /model
      - --served-model-name={{ $root.Values.model.name }}
      - --log-format=json
      - --metrics-compat=vllm
      - --shutdown-timeout={{ $engine.shutdownTimeoutS }}
      - --max-running-requests={{ $engine.maxRunningRequests }}
      - --max-queued-requests={{ $engine.maxQueuedRequests }}
      {{- if gt ($engine.machines | int) 1 }}
      - --nnodes={{ $engine.machines }}
      - --node-rank=$(LWS_WORKER_INDEX)
      - --dist-init-addr=$(LWS_LEADER_ADDRESS):5000
      {{- end }}
      {{- if .role }}
      - --disaggregation-mode={{ .role }}
      - --disaggregation-bootstrap-port={{ $root.Values.disaggregation.bootstrapPort }}
      {{- end }}
      {{- if .store }}
      - --enable-hierarchical-cache
      - --hicache-storage-backend=disk
      - --hicache-storage-dir=/kv
      - --hicache-storage-gb={{ $root.Values.kvStore.gigabytes }}
      {{- end }}
      {{- range $engine.args }}
      - {{ . | quote }}
      {{- end }}
      {{- if eq .role "prefill" }}
      {{- range $root.Values.disaggregation.prefillArgs }}
      - {{ . | quote }}
      {{- end }}
      {{- end }}
    envFrom:
      # TOKENYARD_API_KEY, and TOKENYARD_ADMIN_API_KEY, which the router sends.
      - secretRef: {name: {{ $engine.keysSecret }}}
    {{- if .serves }}
    ports:
      - {name: http, containerPort: 30000}
      {{- if .role }}
      - {name: bootstrap, containerPort: {{ $root.Values.disaggregation.bootstrapPort }}}
      {{- end }}
    startupProbe:
      httpGet: {path: /ready, port: http}
      periodSeconds: 5
      failureThreshold: 120
    readinessProbe:
      httpGet: {path: /ready, port: http}
      periodSeconds: 2
      failureThreshold: 1
    livenessProbe:
      httpGet: {path: /health, port: http}
      periodSeconds: 10
      timeoutSeconds: 5
      failureThreshold: 6
    lifecycle:
      # Proxies continue to send for some seconds after a pod is no longer ready.
      preStop:
        exec: {command: [sleep, "10"]}
    {{- end }}
    resources:
      requests: {cpu: {{ $engine.cpu | quote }}, memory: {{ $engine.memory }}}
      limits:
        memory: {{ $engine.memoryLimit }}
        {{- if $engine.gpus }}
        nvidia.com/gpu: {{ $engine.gpus }}
        {{- end }}
    securityContext:
      allowPrivilegeEscalation: false
      capabilities: {drop: [ALL]}
    volumeMounts:
      - {name: model, mountPath: /model, readOnly: true}
      - {name: shm, mountPath: /dev/shm}
      {{- if .store }}
      - {name: kv, mountPath: /kv}
      {{- end }}
volumes:
  - name: model
    persistentVolumeClaim: {claimName: {{ $root.Values.model.claim }}, readOnly: true}
  - name: shm
    emptyDir: {medium: Memory, sizeLimit: {{ $engine.shmSize }}}
{{- end -}}

{{- /* Labels of an engine's pod: (dict "root" $ "app" name "role" role). The router reads the role. */ -}}
{{- define "tokenyard.engineLabels" -}}
app: {{ .app }}
app.kubernetes.io/name: tokenyard
app.kubernetes.io/instance: {{ .root.Release.Name }}
tokenyard/part: engine
{{- if .role }}
llm-d.ai/role: {{ .role }}
{{- end }}
{{- end -}}

{{- /* A workload of engines: (dict "root" $ "app" name "role" role "replicas" n). */ -}}
{{- define "tokenyard.engines" -}}
{{- $root := .root -}}
{{- $store := $root.Values.kvStore.enabled -}}
{{- $pod := dict "root" $root "role" .role "serves" true "store" $store -}}
{{- $labels := dict "root" $root "app" .app "role" .role -}}
{{- $scaled := and $root.Values.autoscaling.enabled (not (eq .role "prefill")) -}}
{{- if gt ($root.Values.engine.machines | int) 1 -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata:
  name: {{ .app }}
  labels: {app: {{ .app }}}
spec:
  {{- if not $scaled }}
  replicas: {{ .replicas }}
  {{- end }}
  rolloutStrategy:
    type: RollingUpdate
    rollingUpdateConfiguration: {maxUnavailable: 0, maxSurge: 1}
  leaderWorkerTemplate:
    size: {{ $root.Values.engine.machines }}
    # A rank that ends takes its group with it, and node 0 restarts it within the pod: Kubernetes need not.
    restartPolicy: None
    leaderTemplate:
      metadata:
        labels:
          {{- include "tokenyard.engineLabels" $labels | nindent 10 }}
      spec:
        {{- include "tokenyard.enginePod" $pod | nindent 8 }}
    # Other nodes only compute: they have no server, so no probes, and routers do not find them.
    workerTemplate:
      metadata:
        labels: {app: {{ .app }}-node, app.kubernetes.io/instance: {{ $root.Release.Name }}, tokenyard/part: node}
      spec:
        {{- include "tokenyard.enginePod" (dict "root" $root "role" .role "serves" false "store" false) | nindent 8 }}
{{- else -}}
apiVersion: apps/v1
kind: {{ ternary "StatefulSet" "Deployment" $store }}
metadata:
  name: {{ .app }}
  labels: {app: {{ .app }}}
spec:
  {{- if not $scaled }}
  replicas: {{ .replicas }}
  {{- end }}
  selector:
    matchLabels: {app: {{ .app }}}
  {{- if $store }}
  serviceName: {{ .app }}
  podManagementPolicy: Parallel
  updateStrategy: {type: RollingUpdate}
  volumeClaimTemplates:
    - metadata: {name: kv}
      spec:
        accessModes: [ReadWriteOnce]
        {{- with $root.Values.kvStore.storageClassName }}
        storageClassName: {{ . }}
        {{- end }}
        # The store's own limit, and what a file system needs.
        resources: {requests: {storage: {{ add $root.Values.kvStore.gigabytes 5 }}G}}
  {{- else }}
  strategy:
    rollingUpdate: {maxUnavailable: 0, maxSurge: 1}
  {{- end }}
  template:
    metadata:
      labels:
        {{- include "tokenyard.engineLabels" $labels | nindent 8 }}
    spec:
      {{- include "tokenyard.enginePod" $pod | nindent 6 }}
{{- end }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .app }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels: {app: {{ .app }}}
{{- end -}}

{{- /* Who may send requests, as a source of a network policy. */ -}}
{{- define "tokenyard.fromClients" -}}
- from:
    - namespaceSelector: {}
      {{- with .Values.networkPolicy.clients }}
      podSelector:
        matchLabels:
          {{- toYaml . | nindent 10 }}
      {{- end }}
{{- end -}}
